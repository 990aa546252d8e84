"""Groups: entries of aligned tables put together by cell, and by sequence, layer or head where that is asked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtool.compare.pairs import NONE, Cell, Ids, Pairs
from kvtool.errors import KvtoolError
from kvtool.registry import did_you_mean

WORDS = ("policy", "ratio", "budget", "schedule", "evaluate", "event", "sequence", "layer", "kv_head", "q_head")
PLACES = ("sequence", "layer", "kv_head", "q_head")


class Key(NamedTuple):
    """What one group speaks of; `places` are the values of the grouping's own places, in its order."""

    cells: tuple[Cell, Cell]
    event: int
    places: tuple[int, ...]

    def without_event(self) -> Key:
        return Key(self.cells, NONE, self.places)


def checked_by(words: str | Iterable[str]) -> tuple[str, ...]:
    """The words of `--by`, each once, in the order of WORDS; a head is one of its layer.

    Raises:
        KvtoolError: code `usage`.
    """
    parts = words.split(",") if isinstance(words, str) else [part for word in words for part in word.split(",")]
    asked = {part.strip() for part in parts if part.strip()}
    for word in sorted(asked - set(WORDS)):
        raise KvtoolError("usage", f"--by {word} is unknown", did_you_mean(word, list(WORDS)))
    if asked & {"kv_head", "q_head"}:
        asked |= {"layer"} | ({"kv_head"} if "q_head" in asked else set())
    return tuple(word for word in WORDS if word in asked)


def places_of(by: Sequence[str]) -> tuple[str, ...]:
    """Those words of `by` that tell groups of one cell apart."""
    return tuple(word for word in PLACES if word in by)


def has_places(pairs: Pairs, places: Iterable[str]) -> bool:
    """Whether entries of this table name all these places."""
    return all(not len(pairs) or pairs.place(place)[0] != NONE for place in places)


def group_ids(pairs: Pairs, places: Sequence[str], known: dict[Key, int] | None = None) -> tuple[Ids, dict[Key, int]]:
    """[n] the group of every entry, and the groups by their key.

    Args:
        places: by which entries of one cell and event are told apart.
        known: groups to number by; entries of others get NONE. Without, groups are numbered in their order.
    """
    columns = np.stack([pairs.cell, pairs.event, *(pairs.place(place) for place in places)], axis=1)
    distinct, first, inverse = np.unique(columns, axis=0, return_index=True, return_inverse=True)
    keys = [Key(pairs.cells[row[0]], row[1], tuple(row[2:])) for row in distinct.tolist()]
    if known is None:
        order = np.argsort(first, kind="stable")  # as they come, not as numpy sorts them
        known = {keys[place]: rank for rank, place in enumerate(order)}
    numbered = np.array([known.get(key, NONE) for key in keys], dtype=np.int64)
    return numbered[inverse.reshape(-1)] if len(pairs) else np.zeros(0, dtype=np.int64), known


def subset(pairs: Pairs, keep: NDArray[np.bool_]) -> Pairs:
    """`pairs` with the entries where `keep` [n] holds."""
    names = ("cell", "event", *PLACES, "rows_a", "rows_b")
    return replace(pairs, **{name: getattr(pairs, name)[keep] for name in names})


def cell_fields(cells: tuple[Cell, Cell]) -> dict[str, Any]:
    """A cell as a group names it: one value where both sides agree, else a second with `_b`; two policies are
    `policy_a` and `policy_b`."""
    a, b = cells
    found: dict[str, Any] = (
        {"policy": a.policy} if a.policy == b.policy else {"policy_a": a.policy, "policy_b": b.policy}
    )
    for name in ("ratio", "budget", "schedule", "evaluate"):
        found[name] = getattr(a, name)
    for name in ("ratio", "budget", "schedule"):
        if getattr(a, name) != getattr(b, name):
            found[f"{name}_b"] = getattr(b, name)
    return found
