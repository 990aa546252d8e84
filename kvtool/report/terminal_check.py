"""Terminal view of a check: a line per job, then everything that moved (rich)."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from kvtool.check.outcome import Check, JobOutcome
from kvtool.check.sentences import counted, decision_sentences, value_sentences
from kvtool.words import printable

MOST_ROWS = 40  # of a job; --json has them all
COLOURS = {"failed": "red", "missing": "red", "moved": "red", "worse": "red", "tie": "yellow", "new": "yellow"}
QUIET = ("same", "within")


def check_views(check: Check) -> list[Any]:
    """What is printed, from the overview to the one sentence that says whether it passes."""
    views: list[Any] = [_overview(check)]
    for job in check.jobs:
        loud = [row for row in job.rows if row.outcome not in QUIET]
        if not loud or all(row.outcomes() <= {"new"} for row in job.rows):  # a whole new job: the overview says it
            continue
        views += ["", _moved(job, check)]
        if len(loud) > MOST_ROWS:
            views.append(Text(f"and {counted(len(loud) - MOST_ROWS, 'more cell')} of this job: --json lists them all"))
    return [*views, Text(printable(summary_sentence(check)), style="bold")]


def _overview(check: Check) -> Table:
    table = Table("job", "trace", "cells", "kind", "what moved", title_justify="left")
    for job in check.jobs:
        fails = job.fails(check.strict) and check.updated is None
        table.add_row(
            Text(printable(job.name)),
            Text(printable(job.trace or "-")),
            str(len(job.rows) or job.gone),
            job.kind,
            _said(job, fails),
        )
    return table


def _said(job: JobOutcome, fails: bool) -> Text:
    if job.error is not None:
        return Text(printable(f"failed: {job.error.message} [{job.error.code}]"), style="red")
    if job.gone:
        return Text("missing: the suite no longer has this job", style="red" if fails else "yellow")
    counts = job.counts()
    words = ", ".join(f"{count} {outcome}" for outcome, count in counts.items()) or "nothing to check"
    return Text(printable("; ".join([words, *job.notes])), style="red" if fails else "")


def _moved(job: JobOutcome, check: Check) -> Table:
    """One line per cell; what fails comes first."""
    table = Table(
        "cell",
        "kind",
        "outcome",
        "decisions",
        "numbers",
        title=Text(printable(job.name), style="bold"),
        title_justify="left",
    )
    loud = [row for row in job.rows if row.outcome not in QUIET]
    loud.sort(key=lambda row: not row.fails(check.strict))
    for row in loud[:MOST_ROWS]:
        table.add_row(
            Text(printable(row.name)),
            row.kind,
            Text(row.outcome, style=COLOURS.get(row.outcome, "")),
            Text(printable("; ".join(decision_sentences(row))) or "-"),
            Text("\n".join(map(printable, value_sentences(row))) or "-"),
        )
    return table


def summary_sentence(check: Check) -> str:
    """Whether it passes and why, in one line."""
    cells = sum(len(job.rows) for job in check.jobs)
    counts = ", ".join(f"{count} {outcome}" for outcome, count in check.counts().items())
    if check.updated is not None:
        dropped = f"; no longer in the suite and dropped: {', '.join(check.dropped)}" if check.dropped else ""
        if not check.updated:
            return f"{check.baseline} already says this ({counted(cells, 'cell')})"
        anew = f"; everything is recorded anew, nothing was taken over: {check.anew}" if check.anew else ""
        return f"wrote {check.baseline}: {counts}{dropped}{anew}"
    failing = [job.name for job in check.jobs if job.fails(check.strict)]
    if failing:
        some = f"{len(failing)} of {counted(len(check.jobs), 'job')} {'fails' if len(failing) == 1 else 'fail'}"
        return f"{some} ({counts}); kind of the change: {check.kind}"
    all_ = "the one cell passes" if cells == 1 else f"all {cells} cells pass"
    return f"{all_} ({counts}); kind of the change: {check.kind}"
