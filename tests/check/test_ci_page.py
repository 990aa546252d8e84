"""docs/ci.md: workflows that are valid and call what exists, and every key, option and outcome of the gate."""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from typer.main import get_command

from kvtool.check.judge import Kind, Outcome
from kvtool.check.measures import COUNTED
from kvtool.check.suite import DEFAULT_METRICS, OPTIONS, OWN, TOP
from kvtool.check.undefined import COUNTED_BY, SUFFIX
from kvtool.cli.main import app

from .conftest import SAMPLES

TEXT = (SAMPLES.parent / "docs" / "ci.md").read_text()
YAML = [yaml.safe_load(block) for block in re.findall(r"^```yaml\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)]
COMMAND = get_command(app).commands["check"]  # type: ignore[attr-defined]


def strings(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for one in value.values() for text in strings(one)]
    if isinstance(value, list):
        return [text for one in value for text in strings(one)]
    return [value] if isinstance(value, str) else []


def test_there_is_one_workflow_for_each_place() -> None:
    github, gitlab, hook = YAML
    assert github["jobs"]["check"]["steps"]
    assert gitlab["kv-cache policies"]["artifacts"]["reports"]["junit"] == "check.xml"
    assert hook["repos"][0]["hooks"][0]["entry"].startswith("kvtool check ")


@pytest.mark.parametrize("workflow", YAML, ids=["github", "gitlab", "pre-commit"])
def test_every_workflow_calls_check_with_options_that_exist(workflow: Any) -> None:
    lines = [text for text in strings(workflow) if text.startswith("kvtool ")]
    assert len(lines) == 1
    words = shlex.split(lines[0])
    context = COMMAND.make_context("check", words[2:], resilient_parsing=False)  # raises where one does not exist
    assert context.params["strict"]
    assert context.params["no_plugins"]


def test_every_option_of_the_command_is_on_the_page() -> None:
    options = [word for parameter in COMMAND.params for word in parameter.opts if word.startswith("--")]
    shown = {"--output": "`-o FOLDER`"}
    silent = {"--threads", "--help"}  # as everywhere
    missing = [o for o in options if o not in silent and shown.get(o, f"`{o}") not in TEXT]
    assert missing == []


def test_every_key_and_every_outcome_is_on_the_page() -> None:
    words = set(re.findall(r"`([^`\n]+)`", TEXT))
    keys = {word.removeprefix("jobs.").removesuffix(".NAME") for word in words}
    assert {*TOP, *OWN, *OPTIONS} - keys <= {"defaults", "jobs"}  # tables, which the example shows
    assert {*get_args(Outcome), *get_args(Kind), *COUNTED, *DEFAULT_METRICS} <= words


def test_the_suite_on_the_page_is_one() -> None:
    (block,) = re.findall(r"^```toml\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    suite = tomllib.loads(block)
    digests = dict(line.split() for line in (SAMPLES / "DIGESTS").read_text().splitlines())
    assert suite["traces"]["tiny"]["digest"] == digests["tiny-gqa"]


def test_the_attributes_on_the_page_and_of_the_repository_reach_every_trace(tmp_path: Path) -> None:
    (line,) = re.findall(r"`(\S+ -text)` in `\.gitattributes`", TEXT)
    own = next(line for line in (SAMPLES.parent / ".gitattributes").read_text().splitlines() if ".zarr" in line)
    for attributes in (line, own):
        subprocess.run(["git", "init", "-q", tmp_path], check=True)
        (tmp_path / ".gitattributes").write_text(attributes + "\n")
        inside = ("a.zarr/COMMIT.json", "traces/a.zarr/COMMIT.json", "deep/er/a.zarr/sequences/0000/tokens/c/0")
        asked = ["git", "-C", tmp_path, "check-attr", "text", "--", *inside, "traces/gate.json"]
        said = subprocess.run(asked, check=True, capture_output=True, text=True).stdout.splitlines()
        assert [words.rpartition(": ")[2] for words in said] == ["unset"] * len(inside) + ["unspecified"]


def test_the_checkout_brings_what_lfs_keeps() -> None:
    (checkout,) = (step for step in YAML[0]["jobs"]["check"]["steps"] if "checkout" in step.get("uses", ""))
    assert checkout["with"]["lfs"] is True


def test_undefined_values_are_on_the_page() -> None:
    assert {f"`{name}`" for name in (*COUNTED_BY, *COUNTED_BY.values(), f"NAME{SUFFIX}")} <= set(
        re.findall(r"`[^`\n]+`", TEXT)
    )
