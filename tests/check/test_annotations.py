"""Annotations for GitHub: escaped as its runner unescapes, at most ten, and only where they are wanted."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvtool.check.annotations import github_annotations
from kvtool.check.judge import LayerMove, Row
from kvtool.check.outcome import Check, JobOutcome
from kvtool.cli.main import run
from kvtool.errors import KvtoolError
from kvtool.report.terminal_check import summary_sentence

from .conftest import Suite

MOVED = LayerMove(3, "moved", "behaviour", (0, 1))


def found(*jobs: JobOutcome) -> list[str]:
    return github_annotations(Check(Path("suites/check.toml"), Path("check.json"), jobs))


def read(line: str) -> tuple[str, dict[str, str], str]:
    """A workflow command as the runner reads it: kind, properties, message."""
    match = re.fullmatch(r"::(\w+) (.*?)::(.*)", line)
    assert match is not None, line
    properties = dict(part.split("=", 1) for part in match[2].split(","))
    for code, character in (("%3A", ":"), ("%2C", ","), ("%0D", "\r"), ("%0A", "\n"), ("%25", "%")):
        properties = {key: value.replace(code, character) for key, value in properties.items()}
    message = match[3]
    for code, character in (("%0D", "\r"), ("%0A", "\n"), ("%25", "%")):
        message = message.replace(code, character)
    return match[1], properties, message


def test_what_passes_is_not_annotated() -> None:
    assert found(JobOutcome("a", "t", (Row("c", (), ()),))) == []


def test_syntax_in_names_and_messages_is_escaped() -> None:
    name, words = "a: 50 %, b::c\n%0A", "100 % wrong\r\n::error::no"
    error, notice = found(JobOutcome(name, "t", error=KvtoolError("policy-broken", words)))
    assert "\n" not in error
    kind, properties, message = read(error)
    assert kind == "error"
    assert properties == {"file": "suites/check.toml", "title": f"{name}: failed"}
    assert message == f"{words} [policy-broken]"
    assert read(notice)[0] == "notice"


def test_at_most_ten_and_a_summary() -> None:
    rows = tuple(Row(f"cell {number}", (), (MOVED,)) for number in range(23))
    lines = found(JobOutcome("a", "t", rows), JobOutcome("gone", None, gone=2))
    assert [read(line)[0] for line in lines] == ["error"] * 10 + ["notice"]
    assert read(lines[-1])[2] == "24 findings, the first 10 are shown; kind of the change: behaviour"
    assert read(lines[0])[2] == "behaviour: decisions moved in layer 3 (KV heads 0-1)"


@pytest.mark.parametrize(
    ("environment", "options", "wanted"),
    [
        ({}, [], False),
        ({"GITHUB_ACTIONS": "true"}, [], True),
        ({"GITHUB_ACTIONS": "true"}, ["--annotations", "none"], False),
        ({}, ["--annotations", "github"], True),
    ],
)
def test_when_they_are_written(
    suite: Suite,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    environment: dict[str, str],
    options: list[str],
    wanted: bool,
) -> None:
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    path = suite()
    assert run(["check", "check.toml", *options]) == 2  # no baseline yet: said too
    assert ("::error file=check.toml" in capfd.readouterr().err) == wanted
    assert run(["check", str(path), "--update", *options]) == 0
    assert "::" not in capfd.readouterr().err
    baseline = path.parent / "check.json"
    said = json.loads(baseline.read_text())
    for cell in said["jobs"]["first"]["cells"].values():
        cell["mean_output_error"] = -1.0
    baseline.write_text(json.dumps(said))
    assert run(["check", str(path), *options]) == 1
    out, err = capfd.readouterr()
    assert "::error" not in out
    assert ("::error file=check.toml,title=first%3A" in err) == wanted


def test_another_word_is_refused(suite: Suite, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["check", str(suite()), "--annotations", "gitlab"]) == 2
    assert "[usage]" in capfd.readouterr().err


def test_one_finding_is_one() -> None:
    lines = found(JobOutcome("gone", None, gone=1))
    assert read(lines[0])[2] == "the baseline has 1 cell of a job that the suite lacks"
    assert read(lines[-1])[2] == "1 finding; kind of the change: unknown"
    one = Check(Path("check.toml"), Path("check.json"), (JobOutcome("gone", None, gone=1),))
    assert summary_sentence(one).startswith("1 of 1 job fails (1 missing)")
    passes = Check(Path("check.toml"), Path("check.json"), (JobOutcome("a", "t", (Row("c", (), ()),)),))
    assert summary_sentence(passes).startswith("the one cell passes (1 same)")
