"""Terminal view of a check: a line per job, then everything that moved (rich)."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from kvtool.check.outcome import Check, JobOutcome
from kvtool.check.sentences import layers_sentence, row_sentence

MOST_ROWS = 40  # of a job; --json has them all
COLOURS = {"failed": "red", "missing": "red", "moved": "red", "worse": "red", "tie": "yellow", "new": "yellow"}
QUIET = ("same", "within")


def check_views(check: Check) -> list[Any]:
    """What is printed, from the overview to the one sentence that says whether it passes."""
    views: list[Any] = [_overview(check)]
    for job in check.jobs:
        loud = [row for row in job.rows if row.outcome not in QUIET]
        if job.error is not None or job.gone or not loud:
            continue
        views += ["", _moved(job, check)]
        if len(loud) > MOST_ROWS:
            views.append(Text(f"and {len(loud) - MOST_ROWS} more cells of this job: --json lists them all"))
    return [*views, Text(summary_sentence(check), style="bold")]


def _overview(check: Check) -> Table:
    table = Table("job", "trace", "cells", "kind", "what moved", title_justify="left")
    for job in check.jobs:
        fails = job.fails(check.strict) and check.updated is None
        table.add_row(
            Text(job.name), Text(job.trace or "-"), str(len(job.rows) or job.gone), job.kind, _said(job, fails)
        )
    return table


def _said(job: JobOutcome, fails: bool) -> Text:
    if job.error is not None:
        return Text(f"failed: {job.error.message} [{job.error.code}]", style="red")
    if job.gone:
        return Text("missing: the suite no longer has this job", style="red" if fails else "yellow")
    counts = job.counts()
    words = ", ".join(f"{count} {outcome}" for outcome, count in counts.items()) or "nothing to check"
    return Text("; ".join([words, *job.notes]), style="red" if fails else "")


def _moved(job: JobOutcome, check: Check) -> Table:
    """One line per cell; its kind and layers are named once, then each metric that moved."""
    table = Table("cell", "kind", "outcome", "layers", "what", title=Text(job.name, style="bold"), title_justify="left")
    loud = sorted(
        (row for row in job.rows if row.outcome not in QUIET), key=lambda row: not row.fails(check.strict)
    )  # stable: what fails comes first
    for row in loud[:MOST_ROWS]:
        layers = [layer for layer in row.layers if layer.kind != "identical"]
        words = row_sentence(row).partition(": ")[2]
        numbers = "; ".join(part for part in words.split("; ") if not part.startswith(("decisions", "ties", "same")))
        table.add_row(
            Text(row.name),
            row.kind,
            Text(row.outcome, style=COLOURS.get(row.outcome, "")),
            Text(layers_sentence(layers) if layers else "-"),
            Text(numbers or "-"),
        )
    return table


def summary_sentence(check: Check) -> str:
    """Whether it passes and why, in one line."""
    cells = sum(len(job.rows) for job in check.jobs)
    counts = ", ".join(f"{count} {outcome}" for outcome, count in check.counts().items())
    if check.updated is not None:
        dropped = f"; no longer in the suite and dropped: {', '.join(check.dropped)}" if check.dropped else ""
        if not check.updated:
            return f"{check.baseline} already says this ({cells} cells)"
        return f"wrote {check.baseline}: {counts}{dropped}"
    failing = [job.name for job in check.jobs if job.fails(check.strict)]
    if failing:
        return f"{len(failing)} of {len(check.jobs)} jobs fail ({counts}); kind of the change: {check.kind}"
    return f"all {cells} cells pass ({counts}); kind of the change: {check.kind}"
