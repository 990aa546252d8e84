"""Annotations: workflow commands that GitHub Actions shows beside the files of a pull request."""

from __future__ import annotations

from pathlib import Path

from kvtool.check.outcome import Check
from kvtool.check.sentences import counted, gone_sentence, row_sentence
from kvtool.errors import KvtoolError

MOST = 10  # GitHub shows ten errors of a step


def github_annotations(check: Check) -> list[str]:
    """At most MOST errors, and a notice that says how many there are; nothing where nothing fails."""
    if check.ok:
        return []
    found = []
    for job in check.jobs:
        if job.error is not None:
            found.append((f"{job.name}: failed", f"{job.error.message} [{job.error.code}]"))
        elif job.gone:
            found.append((f"{job.name}: missing", gone_sentence(job.gone)))
        for row in job.rows:
            if row.fails(check.strict):
                found.append((f"{job.name}: {row.name}", row_sentence(row)))
    lines = [_command("error", check.suite, title, message) for title, message in found[:MOST]]
    more = f", the first {MOST} are shown" if len(found) > MOST else ""
    summary = f"{counted(len(found), 'finding')}{more}; kind of the change: {check.kind}"
    return [*lines, _command("notice", check.suite, "kvtool check", summary)]


def github_error(suite: Path, error: KvtoolError) -> str:
    """The annotation of a check that could not be made at all."""
    hint = f"\n{error.hint}" if error.hint else ""
    return _command("error", suite, "kvtool check", f"{error.message} [{error.code}]{hint}")


def _command(kind: str, file: Path, title: str, message: str) -> str:
    """`::error file=…,title=…::…`, with what GitHub's runner would read as syntax escaped."""
    return f"::{kind} file={_property(_inside(file))},title={_property(title)}::{_data(message)}"


def _inside(file: Path) -> str:
    """The path as seen from the working folder, which is the repository in a workflow."""
    whole = file.resolve()
    here = Path.cwd().resolve()
    return (whole.relative_to(here) if whole.is_relative_to(here) else whole).as_posix()


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
