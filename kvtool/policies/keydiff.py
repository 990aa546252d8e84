"""KeyDiff: keep the keys that differ from the mean key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from kvtool.policies.parameters import check_choices, check_share, share_of
from kvtool.policies.policy import Policy, Protection
from kvtool.view import View


@dataclass(frozen=True)
class KeyDiff(Policy):
    """Keeps keys that point away from the average key, so that the cache stays diverse. Looks at no query.

    With the normalised anchor the order is that of the summed cosine to all other keys.
    Paper: KeyDiff: Key Similarity-Based KV Cache Eviction, 2504.15364. Deviations: one event over
    all candidates (as in kvpress), where the paper evicts block by block. Cost: O(Hk·N·D).

    Attributes:
        anchor: `normalised` averages unit keys, `raw` averages the keys themselves.
        recent: share of the budget reserved for the newest tokens, rounded down (the paper's sliding window).
    """

    anchor: Literal["normalised", "raw"] = "normalised"
    recent: float = 0.0

    def __post_init__(self) -> None:
        check_choices(self)
        check_share(self, "recent")

    @property
    def nested(self) -> bool:  # type: ignore[override]
        return self.recent == 0

    def protection(self, budget: int) -> Protection:
        return Protection(window=share_of(budget, self.recent))

    def score(self, state: Any, view: View) -> Tensor:
        """[Hk, N], minus the cosine to the anchor. A key of length zero has cosine 0."""
        return torch.cat([self._of_head(keys) for keys in view.keys.split(1)])  # copies of one head at a time

    def _of_head(self, keys: Tensor) -> Tensor:
        averaged = functional.normalize(keys, dim=-1) if self.anchor == "normalised" else keys
        mean = averaged.mean(1, keepdim=True, dtype=torch.float64).to(keys.dtype)
        return -functional.cosine_similarity(keys, mean, dim=-1)
