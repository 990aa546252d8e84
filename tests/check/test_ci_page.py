"""docs/ci.md: workflows that are valid and call what exists, and every key, option and outcome of the gate."""

from __future__ import annotations

import re
import shlex
import tomllib
from typing import Any, get_args

import pytest
import yaml
from typer.main import get_command

from kvtool.check.judge import Kind, Outcome
from kvtool.check.measures import COUNTED
from kvtool.check.suite import DEFAULT_METRICS, OPTIONS, OWN, TOP
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
