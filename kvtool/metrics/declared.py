"""Declared: what a metric may call itself and its columns, so that no two columns of a table mean different things."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from typing import Any, get_args

from kvtool.metrics.ages import AGE_COLUMNS
from kvtool.metrics.metric import Column, Direction, Level, Metric
from kvtool.metrics.table import BUILT_IN, built_in_metrics, columns
from kvtool.result_columns import COUNTS, DECOMPOSED, KEY, KINDS, OWN, PLACE

NAME = re.compile(r"[a-z][a-z0-9_]*")
STORED = ("counts", "timeline")  # what replay itself stores beside the metrics
LEVELS = tuple(level for level in get_args(Level) if level != "kv_head")
# Columns that replay and the policies write into the same tables.
DIAGNOSED = ("rho", "jitter", "fallback")
TITLES = ("policy", "error", "mass", "regret", "w32", "kept")  # of the table that `kvtool replay` prints
OTHERS = ("oracle", "digest", "margin", "evict_step", "predicted_kl_block", "predicted_kl_partial", *DIAGNOSED, *TITLES)
LIVE = (
    *("decisions_differ", "evaluated_steps", "delta_nll", "top1_agreement", "top1_agrees"),
    *("kl", "nll", "nll_full", "generated", "generated_same", "cells", "mean_cosine_distance", "mean_evicted_mass"),
)
# What starts so: windows and kin of built-in metrics, and what `kvtool live` measures.
FAMILIES = ("predicted_kl", "mean_layer_error", "mean_output_error", "measured_", "closed_", "answer_")


@cache
def taken() -> dict[str, str]:
    """Column name -> what has it already."""
    found = dict.fromkeys((*KINDS, *COUNTS, *OTHERS, *LIVE), "a column of kvtool's tables")
    elsewhere = (name for place in (*PLACE.values(), *OWN.values()) for name in place)
    found |= dict.fromkeys((*elsewhere, *DECOMPOSED), "a column of another table")
    found |= dict.fromkeys((column.name for column in AGE_COLUMNS), "a column of the table `ages`")
    found |= {column.name: "a column of a built-in metric" for column in columns()}
    return found | dict.fromkeys(KEY, "a key column of every table")


def fault_of(metric: Any, *, built_in: bool = False) -> str | None:
    """What is wrong with the name, version or columns of `metric`, or None.

    Args:
        built_in: the metric is kvtool's own, so its columns are taken by itself.
    """
    try:  # properties, where they depend on the parameters
        name, version, declared = (getattr(metric, field, None) for field in ("name", "version", "columns"))
    except (Exception, SystemExit) as error:
        return f"does not say its name, version and columns: {type(error).__name__}: {error}"
    if not isinstance(name, str) or not NAME.fullmatch(name):
        return f"has the name {name!r}: lower-case letters, digits and _ only"
    if not built_in and (name in BUILT_IN or name in STORED):
        return f"calls itself {name}, which is kvtool's own"
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        return f"has version {version!r}: a whole number from 1 on"
    if not isinstance(declared, tuple) or not declared or not all(isinstance(c, Column) for c in declared):
        return "declares no columns: a tuple of kvtool.metrics.Column"
    known = {} if built_in else taken()
    if not built_in and (name in known or name.startswith(FAMILIES)):
        return f"calls itself {name}, which is {known.get(name, 'of a family that kvtool has')}"
    for column in declared:
        if (fault := _fault_of_column(column)) is not None:
            return fault
        if not built_in and (column.name in known or column.name.startswith(FAMILIES)):
            owner = known.get(column.name, "of a family that kvtool has")
            return f"has a column {column.name}, which is {owner}"
    if len({(c.name, c.level) for c in declared}) < len(declared):
        return "declares a column twice at one level"
    levels: dict[str, set[str]] = {}
    for column in declared:
        if column.share:
            levels.setdefault(column.name, set()).add(column.level)
    apart = next((name for name, found in levels.items() if found != {"head", "layer"}), None)
    return None if apart is None else f"has a share {apart}, which is to be declared at head and at layer level"


def _fault_of_column(column: Column) -> str | None:
    if not isinstance(column.name, str) or not NAME.fullmatch(column.name):
        return f"has a column {column.name!r}: lower-case letters, digits and _ only"
    if column.level not in LEVELS:
        return f"has column {column.name} at level {column.level!r}: one of {', '.join(LEVELS)}"
    if column.direction not in get_args(Direction):
        return f"has column {column.name} with direction {column.direction!r}: one of {', '.join(get_args(Direction))}"
    if not all(isinstance(said, str) and said.isprintable() and said.strip() for said in (column.unit, column.meaning)):
        return f"has column {column.name} without a unit or a meaning"
    if not isinstance(column.share, bool):
        return f"has column {column.name} with share {column.share!r}: True or False"
    return None


def clash_of(metrics: Iterable[tuple[str, Metric]]) -> str | None:
    """A sentence where two of these (who, metric) share a name or a column, or one is called as the other's column."""
    names: dict[str, str] = {}
    owners: dict[str, str] = {}
    for who, metric in metrics:
        if metric.name in names:
            return f"{who} and {names[metric.name]} have one name, {metric.name}"
        names[metric.name] = who
        for name in {column.name for column in metric.columns}:
            if name in owners:
                return f"{who} and {owners[name]} both have a column {name}"
            owners[name] = who
    for name, who in names.items():
        if owners.get(name, who) != who:
            return f"{who} is called as a column of {owners[name]}, {name}"
    return None


def built_in(metric: Metric) -> bool:
    """Whether `metric` is of a class in kvtool's own table."""
    known = built_in_metrics().get(metric.name)
    return known is not None and type(metric) is type(known)
