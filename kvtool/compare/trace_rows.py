"""Rows of two traces: how far one stored array of one layer parts, head by head and row by row."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvtool.trace import Sequence

ARRAYS = ("keys", "values", "queries", "output_sample")  # in the order in which a layer computes them
FAR = 4.0  # medians
BLOCK_ROWS = 16384


@dataclass(frozen=True)
class Place:
    """Where a row lies: ordered as it is looked for, by row, then head, then array.

    Attributes:
        row: index of the token.
        kv_head: the KV head, also of a query's row.
        array: index into ARRAYS.
        q_head: the query head, -1 for keys and values.
        deviation: see `deviations`.
    """

    row: int
    kv_head: int
    array: int
    q_head: int
    deviation: float

    @property
    def order(self) -> tuple[int, int, int, int]:
        return self.row, self.kv_head, self.array, self.q_head

    @property
    def heads(self) -> dict[str, int | None]:
        """`kv_head` and `q_head`, null for keys and values."""
        return {"kv_head": self.kv_head, "q_head": None if self.q_head < 0 else self.q_head}

    def entry(self, sequence: Sequence, layer: int) -> dict[str, Any]:
        """The place as the document says it; a deviation that is no number is null."""
        return {
            "sequence": sequence.index,
            "layer": layer,
            "token": self.row,
            "position": int(sequence.positions[self.row]),
            "text": sequence.text(self.row) if sequence.has_array("text") else None,
            **self.heads,
            "array": ARRAYS[self.array],
            "deviation": number(self.deviation),
        }


@dataclass(frozen=True)
class Parted:
    """One array of one layer of one sequence.

    Attributes:
        rows, heads: how many were compared.
        largest: the row that deviates most, the first of equals; None where no row was compared.
        first: the first row beyond the bound, None where there is none.
        heads_off: heads with a row beyond the bound.
        rows_off: [n] ascending tokens with a row beyond the bound in some head.
        unequal: (head, row) pairs that are not equal to the bit.
    """

    rows: int
    heads: int
    largest: Place | None
    first: Place | None
    heads_off: int
    rows_off: list[int]
    unequal: int


def number(value: float) -> float | None:
    """`value`, or None where it is infinite or NaN."""
    return value if math.isfinite(value) else None


def deviations(a: Tensor, b: Tensor) -> Tensor:
    """[n] float64, |a - b| of each row over the norm of its row in `a`.

    A row shorter than the rows of its head usually are (in `a` or in `b`, whichever are shorter) is measured against
    that: what is left of a vector that nearly cancels is as wrong as the others. Infinite where either row has a NaN
    or an infinity.

    Args:
        a, b: [n, D] of one head, in any float dtype.
    """
    apart, norms, others = (torch.empty(a.shape[0], dtype=torch.float64) for _ in range(3))
    for start in range(0, a.shape[0], BLOCK_ROWS):
        part = slice(start, start + BLOCK_ROWS)
        x, y = a[part].to(torch.float64), b[part].to(torch.float64)
        apart[part], norms[part], others[part] = (x - y).norm(dim=-1), x.norm(dim=-1), y.norm(dim=-1)
    sound = torch.isfinite(norms) & torch.isfinite(others)
    floor = min(filter(None, (_usual(norms[sound]), _usual(others[sound]))), default=1.0)
    return torch.where(sound, apart / norms.clamp_min(floor), math.inf)


def _usual(norms: Tensor) -> float:
    """Root mean square of norms that are not 0; one that is far above the others counts as FAR medians, so that a few
    huge rows do not hide what the others are. 0 where there is none."""
    norms = norms[norms > 0]
    return float(norms.clamp_max(FAR * float(norms.median())).square().mean().sqrt()) if norms.numel() else 0.0


def compared(a: Sequence, b: Sequence, layer: int, before: int) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """Per array that both hold: its name, the common rows [n] below `before`, and where they lie in either."""
    for name in ARRAYS:
        if not (a.has_array(name, layer) and b.has_array(name, layer)):
            continue
        sides = [rows_of(sequence, name, layer) for sequence in (a, b)]
        common = sides[0][torch.isin(sides[0], sides[1])]
        common = common[common < before]
        yield name, common, torch.searchsorted(sides[0], common), torch.searchsorted(sides[1], common)


def rows_of(sequence: Sequence, name: str, layer: int) -> Tensor:
    """[n] the token of every stored row of an array."""
    if name in ("keys", "values"):
        return torch.arange(sequence.length)
    steps = sequence.query_steps(layer)
    return steps if name == "queries" else steps[steps.numel() - sequence.shape(name, layer)[1] :]


def compare_array(
    a: Sequence, b: Sequence, layer: int, name: str, rows: Tensor, at_a: Tensor, at_b: Tensor, bound: float
) -> Parted:
    """Hold one array of one layer of both traces together, one head at a time."""
    heads, group = a.shape(name, layer)[0], a.geometry(layer).group
    of_query = name in ("queries", "output_sample")
    off = torch.zeros(rows.numel(), dtype=torch.bool)
    largest: Place | None = None
    first: Place | None = None
    heads_off = unequal = 0
    for head in range(heads if rows.numel() else 0):
        x, y = a.head(name, layer, head)[at_a], b.head(name, layer, head)[at_b]
        found = deviations(x, y)
        unequal += int((found > 0).sum())
        beyond = found > bound

        def place(index: int, head: int = head, found: Tensor = found) -> Place:
            kv_head, q_head = (head // group, head) if of_query else (head, -1)
            return Place(int(rows[index]), kv_head, ARRAYS.index(name), q_head, float(found[index]))

        top = place(int(found.argmax()))
        if largest is None or top.deviation > largest.deviation:
            largest = top
        if bool(beyond.any()):
            heads_off += 1
            off |= beyond
            earliest = place(int(beyond.nonzero()[0]))
            first = earliest if first is None or earliest.order < first.order else first
    return Parted(rows.numel(), heads, largest, first, heads_off, rows[off].tolist(), unequal)
