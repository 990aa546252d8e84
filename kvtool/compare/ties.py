"""Ties: whether rounding alone can have parted two decisions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Cuts:
    """How close the cuts of one KV head were.

    Attributes:
        near: step of an event -> rows of unprotected tokens that rounding could have put on the other side of its cut.
        exact: step of an event -> how many of them have exactly the score at the cut.
    """

    near: Mapping[int, frozenset[int]]
    exact: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, steps: Iterable[int], counts: Iterable[int], exact: Iterable[int], rows: Iterable[int]) -> Cuts:
        """From the columns `event_steps`, `event_near_ties`, `event_ties` and `near_rows` of the table `evict_steps`.

        Raises:
            ValueError: where they do not fit each other.
        """
        steps, counts, rows = list(steps), list(counts), list(rows)
        if len(rows) != sum(counts):
            raise ValueError(f"{len(rows)} rows of {sum(counts)} near ties")
        left = iter(rows)
        near = {step: frozenset(islice(left, count)) for step, count in zip(steps, counts, strict=True)}
        return cls(near, dict(zip(steps, exact, strict=True)))

    def all_exact(self, step: int) -> bool:
        """Whether there were near ties at that event and every one was exact: then the newer token stays, whoever
        computes it."""
        return 0 < len(self.near[step]) == self.exact.get(step, 0)


def in_ties(a: Ids, b: Ids, cuts_a: Cuts, cuts_b: Cuts, coarser: str | None = None) -> bool:
    """Whether two decisions part among near ties only.

    At the first event that parts them, both sides must keep equally many, every token that changed sides must be a
    near tie in both, and on one side at least the near ties must not all be exact. What follows from such an event is
    not looked at.

    Args:
        a, b: [T] evict steps that differ.
        coarser: the side, `a` or `b`, that alone says how far rounding reaches; None asks both.
    """
    apart = a != b
    first = int(np.minimum(a[apart], b[apart]).min())
    if first not in cuts_a.near or first not in cuts_b.near:
        return False
    if cuts_a.all_exact(first) and cuts_b.all_exact(first):
        return False
    lost, gained = (a > first) & (b == first), (b > first) & (a == first)
    reach = {"a": cuts_a.near[first], "b": cuts_b.near[first]}
    near = reach["a"] & reach["b"] if coarser is None else reach[coarser]
    return int(lost.sum()) == int(gained.sum()) and set(np.flatnonzero(lost | gained).tolist()) <= near


def coarser_of(precision_a: object, precision_b: object) -> str | None:
    """The side, `a` or `b`, that computed in float32 where the other did in float64: its rounding is what parts
    them. None where both round alike."""
    known = {("float32", "float64"): "a", ("float64", "float32"): "b"}
    return known.get((str(precision_a), str(precision_b)))
