"""Comparison: two sides aligned, and every group of them with its kind of change."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtool.compare.columns import Compared
from kvtool.compare.groups import Key, group_ids, has_places, subset
from kvtool.compare.kinds import IDENTICAL, NUMERICS, TABLE, UNKNOWN, Decisions, decisions_of, most
from kvtool.compare.measured import Values
from kvtool.compare.pairs import NONE, Pairs, align, numbers, other_blocks
from kvtool.compare.sides import Side

NUMBERED = ("cells", "layers", "rows")


@dataclass(frozen=True, eq=False)
class Comparison:
    """Everything that is paired.

    Attributes:
        pairs: of the tables `cells`, `layers`, `rows`.
        values: the compared columns by table, aligned with its pairs.
        moved: table -> [n] whether any compared number of the entry differs.
        decisions: of `evict_steps`.
        sequences: those that both sides have.
    """

    pairs: dict[str, Pairs]
    values: dict[str, list[Values]]
    moved: dict[str, NDArray[np.bool_]]
    decisions: Decisions
    sequences: list[int]

    @classmethod
    def of(cls, a: Side, b: Side, columns: Sequence[Compared], sequences: list[int]) -> Comparison:
        """Align both sides; nothing is judged yet."""
        pairs = {table: align(a, b, table, sequences) for table in NUMBERED}
        values: dict[str, list[Values]] = {table: [] for table in NUMBERED}
        for one in columns:
            rows, name = pairs[one.table], one.column.name
            of_sides = (numbers(a, one.table, name, rows.rows_a), numbers(b, one.table, name, rows.rows_b))
            values[one.table].append(Values(one, *of_sides))
        for table in NUMBERED:
            apart = other_blocks(a, b, table, pairs[table])
            values[table] = [one.without(apart) if one.predicts else one for one in values[table]]
        moved = {
            table: np.logical_or.reduce([np.zeros(len(pairs[table]), bool), *(one.moved for one in values[table])])
            for table in NUMBERED
        }
        return cls(pairs, values, moved, decisions_of(a, b, align(a, b, TABLE, sequences)), sequences)

    def everything(self) -> Iterable[tuple[str, Pairs]]:
        """Every table and its pairs, the decisions last."""
        yield from self.pairs.items()
        yield TABLE, self.decisions.pairs

    def kinds(self, places: Sequence[str]) -> dict[Key, int]:
        """The kind of every group by these places: the strongest of its decisions and numbers.

        Groups of an event take the decisions of the whole run, which are not told apart by event.
        """
        found: dict[Key, int] = {}
        for table, pairs in self.pairs.items():
            if len(pairs) and has_places(pairs, places):
                ids, known = group_ids(pairs, places)
                strongest = most(np.where(self.moved[table], NUMERICS, IDENTICAL), ids, len(known))
                for key, index in known.items():
                    found[key] = max(found.get(key, IDENTICAL), int(strongest[index]))
        of_heads = tuple(place for place in places if place != "q_head")
        ids, known = group_ids(self.decisions.pairs, of_heads)
        strongest = most(self.decisions.kind, ids, len(known))
        decided = {key: int(strongest[index]) for key, index in known.items()}
        if of_heads == tuple(places):
            found = {**dict.fromkeys(decided, IDENTICAL), **found}
        return {key: max(kind, decided.get(_of_head(key, len(of_heads)), UNKNOWN)) for key, kind in found.items()}

    def only(self, keep: Iterable[Key], places: Sequence[str]) -> Comparison:
        """The same comparison with the numbers of these groups; the decisions stay whole."""
        known = {key: index for index, key in enumerate(keep)}
        inside = {}
        for table, pairs in self.pairs.items():
            usable = tuple(places) if has_places(pairs, places) else None
            if usable is None or not len(pairs):
                inside[table] = np.zeros(len(pairs), bool)
            else:
                inside[table] = group_ids(pairs, usable, known)[0] >= 0
        return Comparison(
            {table: subset(pairs, inside[table]) for table, pairs in self.pairs.items()},
            {
                table: [Values(one.compared, one.a[inside[table]], one.b[inside[table]]) for one in found]
                for table, found in self.values.items()
            },
            {table: moved[inside[table]] for table, moved in self.moved.items()},
            self.decisions,
            self.sequences,
        )


def _of_head(key: Key, places: int) -> Key:
    """Where the decisions about this group stand."""
    return Key(key.cells, NONE, key.places[:places])


def shown_groups(kinds: dict[Key, int], events: bool) -> tuple[list[Key], int]:
    """The groups to tell about, and how many are identical.

    An event's group is told where `events` asks for it, or where the whole run hides that it moved.
    """
    whole = {key: kind for key, kind in kinds.items() if key.event == NONE}
    shown, identical = [], 0
    for key, kind in kinds.items():
        if key.event != NONE and not events and (kind == IDENTICAL or whole.get(key.without_event()) != IDENTICAL):
            continue
        if kind == IDENTICAL:
            identical += 1
        else:
            shown.append(key)
    return shown, identical
