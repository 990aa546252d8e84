"""Survival of tokens under eviction, on a clock of events survived rather than of steps lived."""

from __future__ import annotations

import torch
from torch import Tensor


class Survival:
    """S(k) = prod over j <= k of (1 - evicted/at risk at the j-th exposure), Kaplan-Meier over events.

    A token is exposed by every event at which it is an unprotected candidate; the clock counts its
    exposures. Tokens that are never exposed again (they left the window, the run ended) were at risk
    in the exposures they had. Time since birth would not do as a clock: one eviction at the end of a
    prompt meets tokens of every age at once.
    """

    def __init__(self, tokens: int) -> None:
        self.clock = torch.zeros(tokens, dtype=torch.int64)  # exposures so far
        self.at_risk: list[int] = []
        self.evicted: list[int] = []

    def expose(self, rows: Tensor, evicted: Tensor) -> None:
        """One event: `rows` [n] were exposed, `evicted` [n] bool says which of them left."""
        if not rows.numel():
            return
        exposure = self.clock[rows]
        length = max(len(self.at_risk), int(exposure.max()) + 1)
        risk = torch.bincount(exposure, minlength=length).tolist()
        left = torch.bincount(exposure[evicted], minlength=length).tolist()
        padding = [0] * (length - len(self.at_risk))
        self.at_risk = [a + b for a, b in zip(self.at_risk + padding, risk, strict=True)]
        self.evicted = [a + b for a, b in zip(self.evicted + padding, left, strict=True)]
        self.clock[rows] += 1

    def curve(self) -> list[float]:
        """S(1), S(2), ...; empty where no token was ever exposed."""
        values, alive = [], 1.0
        for risk, left in zip(self.at_risk, self.evicted, strict=True):
            alive *= 1.0 - left / risk  # the k-th exposure needs the (k-1)-th: at_risk has no gap
            values.append(alive)
        return values
