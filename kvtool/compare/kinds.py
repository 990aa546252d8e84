"""Kinds of change: the same decisions with other numbers, or other decisions.

`identical`: every token leaves at the same step and every compared number is equal. `numerics`: decisions are equal and
numbers are not, or the first event that decides otherwise does so among tokens that rounding could have put on the
other side of its cut; what follows from that event is numerics too. `behaviour`: anything else. `unknown`: the results
hold no decisions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtool.compare.pairs import Ids, Numbers, Pairs, numbers
from kvtool.compare.sides import Side
from kvtool.compare.ties import Cuts, coarser_of, in_ties
from kvtool.errors import KvtoolError
from kvtool.retained import MOST_NEAR

KINDS = ("identical", "numerics", "unknown", "behaviour")  # what several together are is the last of theirs
IDENTICAL, NUMERICS, UNKNOWN, BEHAVIOUR = range(4)
TABLE = "evict_steps"
CUTS = ("event_steps", "event_near_ties", "event_ties", "near_rows")


@dataclass(frozen=True, eq=False)
class Lists:
    """A column of lists: entry i is values[offsets[i] : offsets[i + 1]]."""

    values: Ids
    offsets: Ids

    @classmethod
    def of(cls, side: Side, column: str) -> Lists | None:
        table = side.result.tables.get(TABLE)
        if table is None or column not in table.column_names:
            return None
        array = table.column(column).combine_chunks()
        if hasattr(array, "chunks"):  # more than one list array can hold
            return None
        values = array.values.to_numpy(zero_copy_only=False)
        return cls(values, array.offsets.to_numpy())

    def __getitem__(self, row: int) -> Ids:
        return self.values[self.offsets[row] : self.offsets[row + 1]]


@dataclass(frozen=True, eq=False)
class Decisions:
    """What both sides decided, head by head.

    Attributes:
        pairs: of the table `evict_steps`; one entry per (cell, sequence, layer, KV head).
        kind: [n] IDENTICAL, NUMERICS (a tie), UNKNOWN or BEHAVIOUR: of decisions alone.
        a, b: evict steps by the rows of the tables; steps_a, steps_b: of events.
        oldest_a, oldest_b: [n] the oldest row that the query of the last event sees.
        margins_known: whether both sides say how close their cuts were.
    """

    pairs: Pairs
    kind: Ids
    a: Lists | None
    b: Lists | None
    steps_a: Lists | None
    steps_b: Lists | None
    oldest_a: Numbers | None
    oldest_b: Numbers | None
    margins_known: bool

    def steps(self, index: int) -> tuple[Ids, Ids]:
        """[T] the evict steps of both sides of one entry."""
        assert self.a is not None
        assert self.b is not None
        return self.a[int(self.pairs.rows_a[index])], self.b[int(self.pairs.rows_b[index])]

    def last_event(self, index: int) -> tuple[int, int] | None:
        """Step of the last event of either side and the oldest row that its query sees; None where there is none or
        it is not recorded."""
        sides = ((self.steps_a, self.oldest_a, self.pairs.rows_a), (self.steps_b, self.oldest_b, self.pairs.rows_b))
        found = [
            (int(step), 0 if oldest is None or np.isnan(oldest[index]) else int(oldest[index]))
            for lists, oldest, rows in sides
            if lists is not None
            for step in lists[int(rows[index])][-1:]
        ]
        return max(found, default=None)


def decisions_of(a: Side, b: Side, pairs: Pairs) -> Decisions:
    """Compare every pair of `evict_step`, exactly."""
    left, right = (Lists.of(side, "evict_step") for side in (a, b))
    steps_a, steps_b = (Lists.of(side, CUTS[0]) for side in (a, b))
    cuts_a, cuts_b = ([Lists.of(side, name) for name in CUTS] for side in (a, b))
    margins = None not in (*cuts_a, *cuts_b)
    kind = np.full(len(pairs), UNKNOWN, dtype=np.int64)
    coarser = coarser_of(*(_precision(side) for side in (a, b)))
    if left is not None and right is not None:
        for index, (row_a, row_b) in enumerate(zip(pairs.rows_a.tolist(), pairs.rows_b.tolist(), strict=True)):
            ours, theirs = left[row_a], right[row_b]
            if len(ours) != len(theirs):
                continue
            if np.array_equal(ours, theirs):
                kind[index] = IDENTICAL
                continue
            kind[index] = BEHAVIOUR
            if margins:
                mine, other = _cuts(cuts_a, row_a, "A"), _cuts(cuts_b, row_b, "B")
                if mine is not None and other is not None and in_ties(ours, theirs, mine, other, coarser):
                    kind[index] = NUMERICS
    oldest_a, oldest_b = _oldest(a, pairs.rows_a), _oldest(b, pairs.rows_b)
    return Decisions(pairs, kind, left, right, steps_a, steps_b, oldest_a, oldest_b, margins)


def _oldest(side: Side, rows: Ids) -> Numbers | None:
    table = side.result.tables.get(TABLE)
    if table is None or "oldest_row" not in table.column_names:
        return None
    return numbers(side, TABLE, "oldest_row", rows)


def _cuts(columns: Sequence[Lists | None], row: int, side: str) -> Cuts | None:
    """How close the cuts of one entry were; None where that is too much to be listed."""
    found = [column[row].tolist() for column in columns if column is not None]
    if sum(found[1]) > MOST_NEAR:
        return None
    try:
        return Cuts.of(*found)
    except ValueError as error:
        raise KvtoolError("result-damaged", f"{side} holds lists of near ties that do not fit: {error}") from error


def _precision(side: Side) -> object:
    return (side.result.manifest.get("replay") or {}).get("precision")


def rolled_up(kinds: Iterable[int]) -> str:
    """What several are together."""
    return KINDS[max(kinds, default=IDENTICAL)]


def most(kinds: Ids, ids: Ids, count: int) -> Ids:
    """[count] the strongest kind in every group; entries with a negative id belong to none."""
    found = np.zeros(count, dtype=np.int64)
    inside = ids >= 0
    np.maximum.at(found, ids[inside], kinds[inside])
    return found


def moved(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.bool_]:
    """[n] where two columns are not the same number; null and null are."""
    different: NDArray[np.bool_] = ~((a == b) | (np.isnan(a) & np.isnan(b)))
    return different
