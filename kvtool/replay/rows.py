"""Rows: which tokens the caches of a layer's KV heads hold, where heads may hold different ones."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Many
from typing import Any

import torch
from torch import Tensor

from kvtool.layer import Layer


def filled(rows: Tensor, count: int, step: int) -> Tensor:
    """`rows`, ascending, and the first others before `step`, `count` in all."""
    if len(rows) == count:
        return rows
    other = torch.ones(step, dtype=torch.bool)
    other[rows] = False
    return torch.cat([rows, other.nonzero()[: count - len(rows), 0]]).sort().values


def by_length(rows: Many[Tensor]) -> Iterator[tuple[list[int], Tensor]]:
    """(heads, tokens [Hk, N]) for every length N of the heads' candidates; heads of another length are filled."""
    for length in dict.fromkeys(len(mine) for mine in rows):
        heads = [head for head, mine in enumerate(rows) if len(mine) == length]
        yield heads, torch.stack([mine if len(mine) == length else rows[heads[0]] for mine in rows])


def oldest_rows(layer: Layer, shared: dict[Any, Any]) -> list[int]:
    """Of every step of `layer` the first row that its query sees."""
    key = "first visible", id(layer)
    if key not in shared:
        shared[key] = layer.geometry.first_visible(torch.arange(layer.tokens)).tolist()
    found: list[int] = shared[key]
    return found
