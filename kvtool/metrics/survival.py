"""Survival of tokens under eviction, on a clock of events survived rather than of steps lived."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

Rows: TypeAlias = np.ndarray[Any, Any]


class Survival:
    """S(k) = prod over j <= k of (1 - evicted/at risk at the j-th exposure), Kaplan-Meier over events, of several
    caches side by side.

    A token is exposed by every event at which it is an unprotected candidate; the clock counts its
    exposures. Tokens that are never exposed again (they left the window, the run ended) were at risk
    in the exposures they had. Time since birth would not do as a clock: one eviction at the end of a
    prompt meets tokens of every age at once.

    Args:
        caches: R of them, of `tokens` rows each.
        events: most exposures that a token may have.
    """

    def __init__(self, caches: int, tokens: int, events: int) -> None:
        self._events, self._met = events, 0
        self._clock = np.zeros((caches, tokens if events > 1 else 0), dtype=np.int32)  # exposures so far
        self._at_risk = np.zeros((caches, events), dtype=np.int64)
        self._evicted = np.zeros((caches, events), dtype=np.int64)

    def expose(self, first: int, exposed: Rows, evicted: Rows) -> None:
        """One event: of the rows from `first` on, `exposed` [R, n] bool were, and `evicted` [R, n] left, all of them
        exposed."""
        if self._met == 0:  # no clock has run yet
            self._at_risk[:, 0] += exposed.sum(1)
            self._evicted[:, 0] += evicted.sum(1)
        else:
            for counts, these in ((self._at_risk, exposed), (self._evicted, evicted)):
                cache, place = these.nonzero()
                at = cache * self._events + self._clock[cache, first + place]
                counts += np.bincount(at, minlength=counts.size).reshape(counts.shape)
        self._met += 1
        if self._met < self._events:
            self._clock[:, first : first + exposed.shape[1]] += exposed

    def curves(self) -> list[tuple[list[float], list[int]]]:
        """Per cache S(1), S(2), ..., and the tokens that had a first, second, ... exposure; empty where no token was
        ever exposed."""
        # The k-th exposure needs the (k-1)-th: at_risk has no gap.
        lengths = (self._at_risk > 0).sum(1).tolist()
        values = np.cumprod(1.0 - self._evicted / np.maximum(self._at_risk, 1), axis=1).tolist()
        at_risk = self._at_risk.tolist()
        return [(values[cache][:length], at_risk[cache][:length]) for cache, length in enumerate(lengths)]
