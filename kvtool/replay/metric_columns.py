"""Metric columns: from what the metrics stored of a layer to entries of the tables."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kvtool.errors import KvtoolError
from kvtool.layer import Layer
from kvtool.metrics import Metric, nullable
from kvtool.replay.plan import Cell, Plan
from kvtool.retained import Event


def refuse_double(plan: Plan, cell: Cell, event: Event) -> None:
    """A policy's diagnostics stand beside the metrics: one column cannot be both."""
    double = sorted(event.diagnostics.keys() & set(plan.numbers))
    if double:
        sentence = f"{cell.label} diagnoses {double[0]}, which is a column of a metric that was asked for"
        raise KvtoolError("policy-broken", sentence, "leave that --metric out")


def columns_of(
    metrics: dict[str, Metric], partial: dict[str, dict[str, Tensor]]
) -> tuple[dict[str, list[Any]], dict[str, Any]]:
    """Head columns [H] and layer columns of all metrics, NaN as None; shares come once all layers are there."""
    heads: dict[str, list[Any]] = {}
    alone: dict[str, Any] = {}
    for name, metric in metrics.items():
        for column in metric.columns:
            if column.share:
                continue
            if column.level == "head":
                heads[column.name] = nullable(partial[name][column.name])
            elif column.level == "layer":
                alone[column.name] = nullable(partial[name][column.name])[0]
    return heads, alone


def row_entries(key: dict[str, Any], layer: Layer, heads: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """Entries of the table `rows`, one per query head, from columns [H]."""
    group = layer.geometry.group
    return [
        {**key, "kv_head": head // group, "q_head": head, **{name: values[head] for name, values in heads.items()}}
        for head in range(layer.geometry.query_heads)
    ]
