"""Metric columns: from what the metrics stored of a layer to entries of the tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
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
    metrics: Mapping[str, Metric], partials: Mapping[str, Sequence[dict[str, Tensor]]]
) -> list[tuple[dict[str, list[Any]], dict[str, Any]]]:
    """Per cell the head columns [H] and layer columns of all metrics, NaN as None; shares come once all layers are
    there.

    Args:
        partials: of every metric, one per cell.
    """
    count = len(next(iter(partials.values())))
    found: list[tuple[dict[str, list[Any]], dict[str, Any]]] = [({}, {}) for _ in range(count)]
    for name, metric in metrics.items():
        for column in metric.columns:
            if column.share or column.level not in ("head", "layer"):
                continue
            values = [partial[column.name] for partial in partials[name]]
            alike = {value.dtype for value in values}  # what others hand out may be whole numbers in one cell only
            each = _plain(values) if len(alike) == 1 else [nullable(value) for value in values]
            for (heads, alone), cell in zip(found, each, strict=True):
                if column.level == "head":
                    heads[column.name] = cell
                else:
                    alone[column.name] = cell[0]
    return found


def _plain(values: Sequence[Tensor]) -> list[list[Any]]:
    """`nullable` of tensors of one shape, all at once."""
    flat = nullable(torch.stack(list(values)))
    width = values[0].numel()
    return [flat[start : start + width] for start in range(0, len(flat), width)]


def row_entries(key: dict[str, Any], layer: Layer, heads: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """Entries of the table `rows`, one per query head, from columns [H]."""
    group = layer.geometry.group
    return [
        {**key, "kv_head": head // group, "q_head": head, **{name: values[head] for name, values in heads.items()}}
        for head in range(layer.geometry.query_heads)
    ]
