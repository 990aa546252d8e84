"""JUnit XML of a check: a test suite per job, a test case per cell, as Jenkins and GitLab read it."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

from kvtool.check.outcome import Check, JobOutcome
from kvtool.check.sentences import gone_sentence, row_sentence
from kvtool.errors import KvtoolError
from kvtool.files import write_durably, writing

# What XML 1.0 cannot hold in any spelling.
FORBIDDEN = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit_xml(check: Check) -> bytes:
    """The document. A cell that fails is a failure, a job that did not run an error. After an update nothing fails."""
    accepted = check.updated is not None
    root = ET.Element("testsuites", name=_clean(f"kvtool check {check.suite}"))
    for job in check.jobs:
        root.append(_suite(job, check.suite.stem, check.strict, accepted))
    for name in ("tests", "failures", "errors"):
        root.set(name, str(sum(int(suite.get(name, "0")) for suite in root)))
    root.set("time", f"{sum(job.seconds for job in check.jobs):.3f}")
    return _bytes(root)


def write_junit(check: Check, path: Path) -> None:
    """Write the document whole or not at all.

    Args:
        path: a file, not a link to one (kvtool.check.places.report_target).

    Raises:
        KvtoolError: `disk-full` or `write-failed`.
    """
    with writing(path):
        write_durably(path, junit_xml(check))


def write_junit_error(suite: Path, error: KvtoolError, path: Path) -> None:
    """Write a document with the one error that kept the check from being made: the file of a former run, which may
    say that all was well, must not stay.

    Raises:
        KvtoolError: `disk-full` or `write-failed`.
    """
    root = ET.Element("testsuites", name=_clean(f"kvtool check {suite}"))
    element = ET.SubElement(root, "testsuite", name=_clean(suite.stem))
    case = _case(element, suite.stem, "the check can be made")
    hint = f"\n{error.hint}" if error.hint else ""
    _fault(case, "error", error.code, f"{error.message} [{error.code}]{hint}")
    for one in (root, element):
        for name, count in (("tests", 1), ("failures", 0), ("errors", 1)):
            one.set(name, str(count))
        one.set("time", "0.000")
    with writing(path):
        write_durably(path, _bytes(root))


def _bytes(root: ET.Element) -> bytes:
    ET.indent(root, " ")
    raw: bytes = ET.tostring(root, encoding="utf-8", xml_declaration=True)
    return raw + b"\n"


def _suite(job: JobOutcome, stem: str, strict: bool, accepted: bool) -> ET.Element:
    suite = ET.Element("testsuite", name=_clean(job.name))
    cases = f"{stem}.{job.name}"
    failures = errors = 0
    if job.error is not None:
        case = _case(suite, cases, "the job runs")
        _fault(case, "error", job.error.code, f"{job.error.message} [{job.error.code}]")
        errors += 1
    elif job.gone:
        case = _case(suite, cases, "the suite has the job")
        if not accepted:
            _fault(case, "failure", "missing", gone_sentence(job.gone))
            failures += 1
    for row in job.rows:
        case = _case(suite, cases, row.name)
        if row.fails(strict) and not accepted:
            _fault(case, "failure", f"{row.kind}: {row.outcome}", row_sentence(row))
            failures += 1
    counts = {"tests": len(suite), "failures": failures, "errors": errors, "skipped": 0}
    for name, count in counts.items():
        suite.set(name, str(count))
    suite.set("time", f"{job.seconds:.3f}")
    return suite


def _case(suite: ET.Element, class_name: str, name: str) -> ET.Element:
    return ET.SubElement(suite, "testcase", classname=_clean(class_name), name=_clean(name))


def _fault(case: ET.Element, tag: str, kind: str, message: str) -> None:
    # The words stand in the text too: GitLab shows no attribute.
    ET.SubElement(case, tag, type=_clean(kind), message=_clean(message)).text = _clean(message)


def _clean(text: str) -> str:
    return FORBIDDEN.sub("\ufffd", text)
