"""Pairs: the entries of two results aligned by key, and those that only one side has."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtool.compare.sides import Side
from kvtool.errors import KvtoolError

Numbers = NDArray[np.float64]
Ids = NDArray[np.int64]
NONE = -1  # no event, no layer, no head
PLACES = ("layer", "kv_head", "q_head")


class Cell(NamedTuple):
    """What an entry speaks of, as its side has it; ratio and budget as the tables hold them."""

    policy: str
    ratio: float | None
    budget: int | None
    schedule: str
    evaluate: str


@dataclass(frozen=True, eq=False)
class Pairs:
    """One table of both sides, aligned.

    Attributes:
        cells: the distinct (cell of A, cell of B); `cell` [n] is an index into it.
        event, sequence, layer, kv_head, q_head: [n], NONE where the table has no such column or the entry no event.
        rows_a, rows_b: [n], where the entries stand in the tables.
        only_a, only_b: entries without a partner: (cell, event, sequence) -> how many.
    """

    cells: list[tuple[Cell, Cell]]
    cell: Ids
    event: Ids
    sequence: Ids
    layer: Ids
    kv_head: Ids
    q_head: Ids
    rows_a: Ids
    rows_b: Ids
    only_a: dict[tuple[Cell, int | None, int], int]
    only_b: dict[tuple[Cell, int | None, int], int]

    def __len__(self) -> int:
        return len(self.cell)

    def place(self, name: str) -> Ids:
        """One of `event`, `sequence`, `layer`, `kv_head`, `q_head`."""
        found: Ids = getattr(self, name)
        return found


@dataclass(frozen=True, eq=False)
class _Entries:
    cells: list[Cell]
    places: list[tuple[int, ...]]  # sequence, event, layer, kv_head, q_head
    rows: list[int]


def _entries(side: Side, table: str) -> _Entries:
    """The entries of one table that the side selects; means over sequences are left out."""
    if table not in side.result.tables:
        return _Entries([], [], [])
    arrow = side.result.tables[table]
    names = arrow.column_names

    def column(name: str) -> list[Any]:
        return arrow.column(name).to_pylist() if name in names else [None] * arrow.num_rows

    # The decisions of a cell are one entry whatever their first event is.
    events = [None] * arrow.num_rows if table == "evict_steps" else column("event")
    key = list(zip(*(column(name) for name in Cell._fields), strict=True))
    seen: dict[tuple[Any, ...], Cell | None] = {}
    cells, places, kept = [], [], []
    numbered = zip(key, column("sequence"), events, *(column(name) for name in PLACES), strict=True)
    for row, (cell, sequence, *others) in enumerate(numbered):
        if cell not in seen:
            seen[cell] = Cell(*cell) if _selected(side, Cell(*cell)) else None
        found = seen[cell]
        if found is not None and sequence is not None:
            cells.append(found)
            places.append((sequence, *(NONE if other is None else other for other in others)))
            kept.append(row)
    return _Entries(cells, places, kept)


def _selected(side: Side, cell: Cell) -> bool:
    asked = side.pins.get("asked")
    return (
        side.policy in (None, cell.policy)
        and side.schedule in (None, cell.schedule)
        and (asked is None or asked == (cell.ratio, cell.budget))
    )


def _keyed(entries: _Entries, pinned: Iterable[str], side: str, table: str) -> dict[tuple[Any, ...], int]:
    """Key -> place in `entries`; a key that stands twice is an error, since either could be meant."""
    pinned = set(pinned)
    spelled: dict[Cell, tuple[Any, ...]] = {}
    for cell in dict.fromkeys(entries.cells):
        asked = None if "asked" in pinned else (cell.ratio, cell.budget)
        policy, schedule = ("policy" in pinned) or cell.policy, ("schedule" in pinned) or cell.schedule
        spelled[cell] = (policy, asked, schedule, cell.evaluate)
    found: dict[tuple[Any, ...], int] = {}
    for place, (cell, where) in enumerate(zip(entries.cells, entries.places, strict=True)):
        found[(spelled[cell], where)] = place
    if len(found) < len(entries.cells):
        raise KvtoolError("result-damaged", f"{side} holds the same entry twice in its table {table}", "replay again")
    return found


def align(a: Side, b: Side, table: str, sequences: Iterable[int]) -> Pairs:
    """Pair the entries of `table` by (sequence, policy, asked, schedule, evaluate, event, layer, head).

    What both sides select is left out of the key. Sequences that are not among `sequences` have no partner.

    Raises:
        KvtoolError: code `result-damaged` for a key that stands twice in one side.
    """
    ours, theirs = _entries(a, table), _entries(b, table)
    pinned = a.pins.keys() & b.pins.keys()
    keys_a, keys_b = _keyed(ours, pinned, "A", table), _keyed(theirs, pinned, "B", table)
    common = set(sequences)
    both = [(here, keys_b[key]) for key, here in keys_a.items() if key in keys_b and key[1][0] in common]
    left, right = [pair[0] for pair in both], [pair[1] for pair in both]
    cells: dict[tuple[Cell, Cell], int] = {}
    index = [cells.setdefault((ours.cells[i], theirs.cells[j]), len(cells)) for i, j in both]
    places = np.array([ours.places[i] for i in left], dtype=np.int64).reshape(-1, 5)
    return Pairs(
        list(cells),
        np.array(index, dtype=np.int64),
        event=places[:, 1],
        sequence=places[:, 0],
        layer=places[:, 2],
        kv_head=places[:, 3],
        q_head=places[:, 4],
        rows_a=np.array([ours.rows[i] for i in left], dtype=np.int64),
        rows_b=np.array([theirs.rows[j] for j in right], dtype=np.int64),
        only_a=_unpaired(ours, left),
        only_b=_unpaired(theirs, right),
    )


def _unpaired(entries: _Entries, paired: Sequence[int]) -> dict[tuple[Cell, int | None, int], int]:
    taken = set(paired)
    found: dict[tuple[Cell, int | None, int], int] = {}
    for place, (cell, where) in enumerate(zip(entries.cells, entries.places, strict=True)):
        if place not in taken:
            key = (cell, None if where[1] == NONE else where[1], where[0])
            found[key] = found.get(key, 0) + 1
    return found


def numbers(side: Side, table: str, column: str, rows: Ids) -> Numbers:
    """[n] the column at these rows, NaN where it is null or infinite."""
    values = np.asarray(side.result.tables[table].column(column).to_numpy(), dtype=np.float64)[rows]
    return np.where(np.isfinite(values), values, np.nan)


def other_blocks(a: Side, b: Side, table: str, pairs: Pairs) -> NDArray[np.bool_]:
    """[n] entries whose predicted KL speaks of something else in B: gradients cut into blocks of another length, or
    another part of the model (docs/metrics.md)."""
    apart = np.zeros(len(pairs), dtype=np.bool_)
    for name in ("predicted_kl_block", "predicted_kl_partial"):
        tables = [side.result.tables[table] for side in (a, b)]
        if all(name in one.column_names for one in tables):
            ours, theirs = (np.asarray(one.column(name).to_pylist(), dtype=object) for one in tables)
            apart |= ours[pairs.rows_a] != theirs[pairs.rows_b]
    return apart


def unlike_layers(a: Side, b: Side, sequences: Iterable[int]) -> bool:
    """Whether a sequence was measured on other layers in B: means over layers are then no longer comparable."""
    found = []
    for side in (a, b):
        table = side.result.tables["layers"]
        found.append(set(zip(table.column("sequence").to_pylist(), table.column("layer").to_pylist(), strict=True)))
    chosen = set(sequences)
    return any(sequence in chosen for sequence, _ in found[0] ^ found[1])


def common_sequences(a: Side, b: Side) -> list[int]:
    """Sequences that are the same in both: all with one trace digest; else those whose prompt and length agree."""
    described = [_lengths(side) for side in (a, b)]
    same = a.result.manifest["trace"]["digest"] == b.result.manifest["trace"]["digest"]
    return [i for i, size in described[0].items() if i in described[1] and (same or size == described[1][i])]


def _lengths(side: Side) -> dict[int, tuple[int | None, int]]:
    """Sequence -> (rows of its prompt, rows)."""
    said = side.result.manifest["sequences"]
    return dict(zip(said["indices"], zip(said["prompt_lengths"], said["lengths"], strict=True), strict=True))


def finite(value: float) -> float | None:
    """`value` as JSON says it: what is not defined is null."""
    return None if math.isnan(value) else float(value)
