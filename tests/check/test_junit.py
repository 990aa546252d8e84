"""JUnit XML: what the common schema asks for, counts that are right, and names that would break it."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from kvtool.check.judge import LayerMove, Row, Tolerance, Value
from kvtool.check.junit import junit_xml
from kvtool.check.outcome import Check, JobOutcome
from kvtool.cli.main import run
from kvtool.errors import KvtoolError

from .conftest import Suite

# Attributes and children that the schema of Jenkins knows, and GitLab reads a part of.
ALLOWED = {
    "testsuites": ({"name", "time", "tests", "failures", "disabled", "errors"}, {"testsuite"}),
    "testsuite": (
        {
            "name",
            "tests",
            "failures",
            "errors",
            "time",
            "disabled",
            "skipped",
            "timestamp",
            "hostname",
            "id",
            "package",
        },
        {"testcase", "properties", "system-out", "system-err"},
    ),
    "testcase": (
        {"name", "classname", "time", "assertions", "status"},
        {"failure", "error", "skipped", "system-out", "system-err"},
    ),
    "failure": ({"type", "message"}, set()),
    "error": ({"type", "message"}, set()),
}


def value(outcome: str, old: float | None = 1.0, new: float | None = 2.0) -> Value:
    return Value("error", outcome, old, new, "lower", Tolerance())  # type: ignore[arg-type]


NASTY = 'a <b> & "c" \x00\x1b[31m\ud800 ]]> é\ufffe'
JOBS = (
    JobOutcome("first", "t", (Row("ok", (value("same"),), ()), Row("bad", (value("worse"),), ())), seconds=1.5),
    JobOutcome(NASTY, "t", (Row(NASTY, (), (LayerMove(3, "moved", "behaviour", (0, 1)),)),)),
    JobOutcome("broken", "t", error=KvtoolError("policy-broken", NASTY), seconds=0.25),
    JobOutcome("gone", None, gone=3),
    JobOutcome("fresh", "t", (Row("new", (value("new", None),), ()),)),
)


def walked(element: ET.Element) -> None:
    attributes, children = ALLOWED[element.tag]
    assert set(element.attrib) <= attributes
    assert {child.tag for child in element} <= children
    for child in element:
        walked(child)


def tree(*, strict: bool = False, updated: bool | None = None) -> ET.Element:
    return ET.fromstring(junit_xml(Check(Path("check.toml"), Path("check.json"), JOBS, strict, updated)))


@pytest.mark.parametrize(("strict", "failures"), [(False, 3), (True, 4)])
def test_it_follows_the_schema_and_counts_right(strict: bool, failures: int) -> None:
    root = tree(strict=strict)
    walked(root)
    assert {suite.get("name") for suite in root} >= {"first", "broken", "gone", "fresh"}
    for element in (root, *root):
        cases = list(element.iter("testcase"))
        assert int(element.get("tests", "-1")) == len(cases)
        assert int(element.get("failures", "-1")) == len(list(element.iter("failure")))
        assert int(element.get("errors", "-1")) == len(list(element.iter("error")))
    assert (root.get("tests"), root.get("failures"), root.get("errors")) == ("6", str(failures), "1")
    assert root.get("time") == "1.750"
    names = [(case.get("classname"), case.get("name")) for case in root.iter("testcase")]
    assert len(set(names)) == len(names)  # GitLab shows the first of two alike


def test_what_failed_stands_in_the_text_too() -> None:
    (bad,) = (case for case in tree().iter("testcase") if case.get("name") == "bad")
    (failure,) = bad
    assert failure.text == failure.get("message")
    assert failure.text is not None
    assert "error worse: 1 to 2 (+100 %)" in failure.text


def test_what_xml_cannot_hold_is_replaced() -> None:
    (case,) = (case for case in tree().iter("testcase") if "<b>" in (case.get("name") or ""))
    assert case.get("name") == 'a <b> & "c" \ufffd\ufffd[31m\ufffd ]]> é\ufffd'


def test_an_update_accepts_what_it_finds() -> None:
    root = tree(updated=True)
    assert (root.get("failures"), root.get("errors")) == ("0", "1")


def test_the_option(suite: Suite, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = suite()
    assert run(["check", str(path), "--update", "--junit", str(tmp_path / "no" / "j.xml")]) == 2
    assert "--junit" in capfd.readouterr().err
    assert run(["check", str(path), "--update", "--junit", str(tmp_path / "j.xml")]) == 0
    root = ET.parse(tmp_path / "j.xml").getroot()
    walked(root)
    assert (root.get("tests"), root.get("failures")) == ("4", "0")
