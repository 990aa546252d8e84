"""Ties: whether rounding alone can have parted two decisions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Cuts:
    """How close the cuts of one KV head were.

    Attributes:
        near: step of an event -> unprotected tokens that rounding could have put on the other side of its cut.
        exact: step of an event -> those of them whose score equals the one at the cut.
    """

    near: dict[int, int]
    exact: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, steps: Iterable[int], near: Iterable[int], exact: Iterable[int]) -> Cuts:
        """From the columns `event_steps`, `event_near_ties` and `event_ties` of a result's table `evict_steps`."""
        steps = list(steps)
        return cls(dict(zip(steps, near, strict=True)), dict(zip(steps, exact, strict=True)))

    def all_exact(self, step: int) -> bool:
        """Whether there were near ties at that event and every one was exact: then the newer token stays, whoever
        computes it."""
        return 0 < self.near[step] == self.exact.get(step, 0)


def in_ties(a: Ids, b: Ids, cuts_a: Cuts, cuts_b: Cuts, coarser: str | None = None) -> bool:
    """Whether two decisions part among near ties only.

    At the first event that parts them, both sides must keep equally many, no more tokens may have changed sides
    than there were near ties in either, and on one side at least they must not all be exact. What follows from
    such an event is not looked at.

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
    lost, gained = int(((a > first) & (b == first)).sum()), int(((b > first) & (a == first)).sum())
    reach = {"a": cuts_a.near[first], "b": cuts_b.near[first]}
    return lost == gained and lost + gained <= (min(reach.values()) if coarser is None else reach[coarser])


def coarser_of(precision_a: object, precision_b: object) -> str | None:
    """The side, `a` or `b`, that computed in float32 where the other did in float64: its rounding is what parts
    them. None where both round alike."""
    known = {("float32", "float64"): "a", ("float64", "float32"): "b"}
    return known.get((str(precision_a), str(precision_b)))
