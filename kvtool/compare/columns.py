"""Columns: which numbers of two results are compared, and which way is better."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvtool.compare.sides import Side
from kvtool.errors import KvtoolError
from kvtool.metrics import Column, built_in_metrics
from kvtool.registry import did_you_mean
from kvtool.result import LIVE

TABLE_OF = {"cell": "cells", "layer": "layers", "head": "rows"}
HEAD_ERROR, LAYER_ERROR = ("output_error", "closed_output_error"), "layer_error"
NATS = "nats per step"
# What a live run measures; docs/live.md defines it.
LIVE_COLUMNS = (
    Column("measured_kl", "cell", NATS, "lower", "KL(full || evicted), mean over steps"),
    Column("measured_kl_max", "cell", "nats", "lower", "the worst step"),
    Column("measured_kl_targets", "cell", NATS, "lower", "over the steps that predicted_kl speaks of"),
    Column("delta_nll", "cell", NATS, "lower", "change of the negative log-likelihood of what follows"),
    Column("top1_agreement", "cell", "share", "higher", "steps whose likeliest token is the same"),
    Column("answer_loss", "cell", "nats per token", "lower", "likelihood lost on the answer"),
    Column("closed_layer_error", "cell", "relative L2", "lower", "mean layer error of the closed loop"),
    Column("closed_output_error", "cell", "relative L2", "lower", "mean output error of the closed loop"),
    Column("closed_layer_error", "layer", "relative L2", "lower", "layer error of the closed loop"),
    Column("closed_output_error", "head", "relative L2", "lower", "output error of the closed loop"),
)
FURTHER_WINDOW = re.compile(r"predicted_kl_w\d+")


@dataclass(frozen=True)
class Compared:
    """One column of one table.

    Attributes:
        metric: whose version says whether two results mean the same by it.
        decides: whether B counts as worse where this column is.
    """

    metric: str
    column: Column
    decides: bool = True

    @property
    def table(self) -> str:
        return TABLE_OF[self.column.level]


def compared_columns(a: Side, b: Side, asked: Sequence[str]) -> tuple[list[Compared], list[str]]:
    """What both results hold and mean the same by, and sentences about what they do not.

    Args:
        asked: names of columns or metrics; none is all.

    Raises:
        KvtoolError: code `usage` for a name that neither result holds.
    """
    found: list[Compared] = []
    warnings: list[str] = []
    ours, theirs = _versions(a), _versions(b)
    for one in _known(a, b):
        versions = ours.get(one.metric), theirs.get(one.metric)
        there = [one.column.name in side.result.tables[one.table].column_names for side in (a, b)]
        if not any(there):
            continue
        if versions[0] != versions[1] and None not in versions:
            sentence = f"{one.metric} is version {versions[0]} in A and {versions[1]} in B: it is not compared"
            warnings += [sentence] if sentence not in warnings else []
        elif not all(there):
            warnings.append(f"only {'A' if there[0] else 'B'} holds {one.column.name} ({one.column.level})")
        else:
            found.append(one)
    names = list(dict.fromkeys(name for one in found for name in (one.column.name, one.metric)))
    for word in asked:
        if word not in names:
            raise KvtoolError("usage", f"there is no metric {word!r} to compare", did_you_mean(word, names))
    if asked:
        return [one for one in found if one.column.name in asked or one.metric in asked], warnings
    details = _details()
    return [replace(one, decides=one.column.name not in details) for one in found], warnings


def _details() -> set[str]:
    """What tells why: quantiles, masses, gaps and turns of heads. Errors and predictions tell whether."""
    heads = (
        column.name for metric in built_in_metrics().values() for column in metric.columns if column.level == "head"
    )
    return {name for name in heads if name not in HEAD_ERROR}


def _versions(side: Side) -> dict[str, Any]:
    return dict(side.result.manifest.get("metrics") or {})


def _known(a: Side, b: Side) -> list[Compared]:
    """Every column that a metric could have filled, each once."""
    found = [
        Compared(name, column)
        for name, metric in built_in_metrics().items()
        for column in metric.columns
        if column.level in TABLE_OF
    ]
    cells = [*a.result.tables["cells"].column_names, *b.result.tables["cells"].column_names]
    have = {one.column.name for one in found}
    template = next(one for one in found if FURTHER_WINDOW.fullmatch(one.column.name))
    for name in dict.fromkeys(cells):
        if FURTHER_WINDOW.fullmatch(name) and name not in have:
            column = template.column
            found.append(
                Compared(template.metric, Column(name, "cell", column.unit, column.direction, "with other windows"))
            )
    found += [one for side in (a, b) for one in _described(side) if one not in found]
    if a.result.schema == LIVE:
        found = [Compared("measured_kl", column) for column in LIVE_COLUMNS] + found
    return found


def _described(side: Side) -> list[Compared]:
    """Columns of metrics that are not kvtool's own, as the manifest describes them: nothing has to be installed."""
    described = (side.result.manifest.get("replay") or {}).get("metrics") or []
    return [
        Compared(metric["name"], Column(**column))
        for metric in described
        for column in metric["columns"]
        if column["level"] in TABLE_OF
    ]
