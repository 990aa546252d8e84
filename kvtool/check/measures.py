"""Measures: the words that a suite may list under `metrics`, and the columns that they mean."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from kvtool.check.judge import Direction
from kvtool.check.suite import Job
from kvtool.check.undefined import COUNTED_BY, SUFFIX
from kvtool.errors import KvtoolError
from kvtool.metrics import Metric, PredictedKL, built_in_metrics
from kvtool.metrics.predicted_kl import WINDOW
from kvtool.metrics.table import BUILT_IN, SHELF
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
        metric, version: the metric that owns it, None for a count of decisions.
        counts: the column whose undefined values it counts, None for any other number.
        asked: whether the suite names it; a count that it does not name is recorded where it is above 0.
    """

    name: str
    table: str
    unit: str
    direction: Direction
    metric: str | None
    version: int | None
    counts: str | None = None
    asked: bool = True


def further_metrics(job: Job) -> tuple[str, ...]:
    """Those words of a job that are metrics which run only because they are named: of packages, or of files.

    kvtool's own words are its own: a package that gives one of them is not even imported.

    Raises:
        KvtoolError: code `suite` for one of them with parameters.
    """
    found = []
    for word in job.metrics:
        name = split_spec(word, "metric").name
        if _is_own(name):
            if word != name:
                raise KvtoolError("suite", f"metrics: {word!r}: {name} is kvtool's own and takes no parameters")
        elif ":" in word or word in SHELF.names():
            found.append(word)
    return tuple(found)


def measures_of(job: Job, plan: Plan) -> dict[str, Measure]:
    """Column -> measure of a job, whose words are columns, or metrics with all their columns; beside every mean the
    count of what it leaves out.

    Raises:
        KvtoolError: code `suite` for a word that is neither.
    """
    known = {name: _columns(metric) for name, metric in plan.metrics.items()}
    columns = _merged(known.values())
    like = columns[_of_window(WINDOW)]
    columns |= {name: replace(like, name=name) for name in map(_of_window, plan.kl_windows)}
    asked = {split_spec(one.label, "metric").name: one.name for one in plan.asked}
    found: dict[str, Measure] = {}
    for word in job.metrics:
        name = split_spec(word, "metric").name
        if name in asked:
            found |= known[asked[name]]
        elif word in columns:
            found[word] = columns[word]
        elif word in known:
            found |= known[word]
        else:
            hint = did_you_mean(word, sorted({*columns, *SHELF.names()}))
            raise KvtoolError("suite", f"metrics: there is no column and no metric {word!r}", hint)
    return {**found, **_counts(found, columns)}


def _is_own(word: str) -> bool:
    """Whether this is a metric or a column of kvtool's own, of windows of any width too."""
    own = {*COUNTED, *BUILT_IN, *(column.name for metric in built_in_metrics().values() for column in metric.columns)}
    return word in own or re.fullmatch(_of_window(r"\d+"), word) is not None


def _of_window(steps: int | str) -> str:
    """The column of the predicted KL with windows of that many steps."""
    return f"{PredictedKL.name}_w{steps}"


def _counts(found: dict[str, Measure], columns: dict[str, Measure]) -> dict[str, Measure]:
    """The counts of undefined values that belong to what is recorded; fewer are better."""
    counts = {}
    for name, one in found.items():
        if one.table != "cells":
            count = f"{name}{SUFFIX}"
            counts[count] = replace(one, name=count, direction="lower", counts=name, asked=False)
        elif (count := COUNTED_BY.get(name, "")) in columns:
            counts[count] = replace(columns[count], direction="lower", counts=name, asked=count in found)
    for column, count in COUNTED_BY.items():  # one that is asked for alone
        if count in found and count not in counts:
            counts[count] = replace(found[count], direction="lower", counts=column)
    return counts


def _merged(parts: Iterable[dict[str, Measure]]) -> dict[str, Measure]:
    """All columns; one of cells comes before one of layers or heads that has its name."""
    found = {name: Measure(name, "cells", "tokens or events", "none", None, None) for name in COUNTED}
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
                one = Measure(column.name, table, column.unit, column.direction, metric.name, metric.version)
                found.setdefault(column.name, one)
    return found
