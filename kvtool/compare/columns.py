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
LEVELS = {"cell": "whole cell", "layer": "layer", "head": "query head"}
PLACES_OF = {
    "cell": ("sequence",),
    "layer": ("sequence", "layer"),
    "head": ("sequence", "layer", "kv_head", "q_head"),
}
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


@dataclass(frozen=True)
class Columns:
    """What is compared.

    Attributes:
        compared: what both results hold and mean the same by.
        refused: sentences about metrics that B cannot be held against, since it lacks them or means something else by
            them: a comparison with holes is no pass.
        warnings: sentences about what else only one side holds.
    """

    compared: list[Compared]
    refused: list[str]
    warnings: list[str]


def compared_columns(a: Side, b: Side, asked: Sequence[str], places: Sequence[str] = ()) -> Columns:
    """What both results hold and mean the same by, and sentences about what they do not.

    Args:
        asked: names of columns, or of metrics for all their columns; none is all.
        places: that groups are told apart by.

    Raises:
        KvtoolError: code `usage` for a name that not both results hold, or that has no value at such a place.
    """
    found: list[Compared] = []
    refused: list[str] = []
    warnings: list[str] = []
    ours, theirs = _versions(a), _versions(b)
    for one in _known(a, b):
        versions = ours.get(one.metric), theirs.get(one.metric)
        there = [one.column.name in side.result.tables[one.table].column_names for side in (a, b)]
        if not any(there):
            continue
        if versions[0] != versions[1] and None not in versions:
            sentence = f"{one.metric} is version {versions[0]} in A and {versions[1]} in B: it is not compared"
            refused += [sentence] if sentence not in refused else []
        elif all(there):
            found.append(one)
        elif there[0] and _decides(one) and _known_somewhere(a, one):
            refused.append(f"{one.column.name} ({one.column.level}) is in A and not in B")
        else:
            warnings.append(f"only {'A' if there[0] else 'B'} holds {one.column.name} ({one.column.level})")
    if asked:
        return Columns(_asked(found, asked, places, refused), refused, warnings)
    if not any(_decides(one) for one in found):
        refused.append("no error and no prediction is in both, so nothing decides whether B is worse")
    return Columns([replace(one, decides=_decides(one)) for one in found], refused, warnings)


def _asked(
    found: Sequence[Compared], asked: Sequence[str], places: Sequence[str], refused: list[str]
) -> list[Compared]:
    """What these words name: a column of that name, else all columns of a metric."""
    names = list(dict.fromkeys(name for one in found for name in (one.column.name, one.metric)))
    chosen: list[Compared] = []
    for word in asked:
        named = [one for one in found if one.column.name == word] or [one for one in found if one.metric == word]
        if not named:
            said = next((sentence for sentence in refused if sentence.startswith(f"{word} ")), None)
            raise KvtoolError(
                "usage", said or f"there is no metric {word!r} in both to compare", did_you_mean(word, names)
            )
        told = [one for one in named if set(places) <= set(PLACES_OF[one.column.level])]
        if not told:
            apart = " and ".join(places)
            known = dict.fromkeys(o.column.name for o in found if set(places) <= set(PLACES_OF[o.column.level]))
            raise KvtoolError(
                "usage",
                f"{word} has no value for each {apart}: it speaks of a {LEVELS[named[0].column.level]}",
                f"told apart by {apart} are: {', '.join(known)}",
            )
        chosen += [one for one in told if one not in chosen]
    return chosen


def _decides(one: Compared) -> bool:
    """Whether B is worse where this column is. Errors and predictions tell that; quantiles, masses, gaps and turns of
    heads tell why."""
    own = one.metric in built_in_metrics() and one.column.level == "head" and one.column.name not in HEAD_ERROR
    return one.column.direction != "none" and not own


def _known_somewhere(side: Side, one: Compared) -> bool:
    table = side.result.tables[one.table]
    return bool(table.column(one.column.name).null_count < table.num_rows)


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
    found = list(dict.fromkeys([*found, *_described(a), *_described(b)]))
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
