"""Measures: the words that a suite may list under `metrics`, and the columns that they mean."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvtool.check.judge import Direction
from kvtool.check.suite import Job
from kvtool.errors import KvtoolError
from kvtool.metrics import Metric
from kvtool.metrics.table import SHELF
from kvtool.registry import did_you_mean, split_spec
from kvtool.replay.plan import Plan

LEVELS = {"cell": "cells", "layer": "layers", "head": "rows"}
# Counts of decisions, which no metric owns.
COUNTED = ("candidates", "events", "evicted", "fallbacks", "ties")


@dataclass(frozen=True)
class Measure:
    """One number of every cell.

    Attributes:
        name: of its column.
        table: where the column stands; of `layers` and `rows` the mean over the cell is checked, undefined ones apart.
        version: of the metric that owns it, None for a count.
    """

    name: str
    table: str
    unit: str
    direction: Direction
    version: int | None


def further_metrics(job: Job) -> tuple[str, ...]:
    """Those words of a job that are metrics which run only because they are named: of packages, or of files."""
    return tuple(word for word in job.metrics if ":" in word or word in SHELF.names())


def measures_of(job: Job, plan: Plan) -> dict[str, Measure]:
    """Column -> measure of a job, whose words are columns, or metrics with all their columns.

    Raises:
        KvtoolError: code `suite` for a word that is neither.
    """
    known = {name: _columns(metric) for name, metric in plan.metrics.items()}
    columns = _merged(known.values())
    found: dict[str, Measure] = {}
    for word in job.metrics:
        name = split_spec(word, "metric").name
        labelled = [asked.name for asked in plan.asked if split_spec(asked.label, "metric").name == name]
        if word in columns:
            found[word] = columns[word]
        elif mine := next((known[one] for one in (*labelled, name) if one in known), None):
            found |= mine
        else:
            hint = did_you_mean(word, sorted({*columns, *SHELF.names()}))
            raise KvtoolError("suite", f"there is no column and no metric {word!r}", hint)
    return found


def _merged(parts: Iterable[dict[str, Measure]]) -> dict[str, Measure]:
    """All columns; one of cells comes before one of layers or heads that has its name."""
    found = {name: Measure(name, "cells", "tokens or events", "none", None) for name in COUNTED}
    for table in LEVELS.values():
        for part in parts:
            for name, one in part.items():
                if one.table == table:
                    found.setdefault(name, one)
    return found


def _columns(metric: Metric) -> dict[str, Measure]:
    """The columns of a metric that stand in a table of cells, layers or heads."""
    found: dict[str, Measure] = {}
    for level, table in LEVELS.items():
        for column in metric.columns:
            if column.level == level:
                one = Measure(column.name, table, column.unit, column.direction, metric.version)
                found.setdefault(column.name, one)
    return found
