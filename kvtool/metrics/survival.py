"""Survival of tokens under eviction, on a clock of events survived rather than of steps lived."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

Rows: TypeAlias = np.ndarray[Any, Any]


class Survival:
    """S(k) = prod over j <= k of (1 - evicted/at risk at the j-th exposure), Kaplan-Meier over events.

    A token is exposed by every event at which it is an unprotected candidate; the clock counts its
    exposures. Tokens that are never exposed again (they left the window, the run ended) were at risk
    in the exposures they had. Time since birth would not do as a clock: one eviction at the end of a
    prompt meets tokens of every age at once.
    """

    def __init__(self, tokens: int) -> None:
        self._clock = np.zeros(tokens, dtype=np.int64)  # exposures so far
        self._at_risk = np.zeros(0, dtype=np.int64)
        self._evicted = np.zeros(0, dtype=np.int64)

    def expose(self, rows: Rows, evicted: Rows) -> None:
        """One event: `rows` [n] were exposed, `evicted` [n] bool says which of them left."""
        if not rows.size:
            return
        exposure = self._clock[rows]
        known, length = len(self._at_risk), max(len(self._at_risk), int(exposure.max()) + 1)
        at_risk = np.bincount(exposure, minlength=length)
        left = np.bincount(exposure[evicted], minlength=length)
        at_risk[:known] += self._at_risk
        left[:known] += self._evicted
        self._at_risk, self._evicted = at_risk, left
        self._clock[rows] += 1

    @property
    def at_risk(self) -> list[int]:
        """Tokens that had a first, second, ... exposure."""
        found: list[int] = self._at_risk.tolist()
        return found

    def curve(self) -> list[float]:
        """S(1), S(2), ...; empty where no token was ever exposed."""
        # The k-th exposure needs the (k-1)-th: at_risk has no gap.
        values: list[float] = np.cumprod(1.0 - self._evicted / self._at_risk).tolist()
        return values
