"""NovelKeys: an example policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvtool.policies import Policy
from kvtool.view import View


@dataclass(frozen=True)
class NovelKeys(Policy):
    """Keep tokens whose key differs from the keys just before it: something new begins there.

    Not from a paper: an example. Score: the distance of a key to the mean of the `memory` candidates before it; the
    first candidate has none before it and scores +inf. Cost: one running sum over the keys.
    """

    memory: int = 4

    def __post_init__(self) -> None:
        if self.memory < 1:
            raise ValueError("memory is a positive number of tokens")

    def score(self, state: Any, view: View) -> Tensor:
        keys = view.keys.to(torch.float64)  # [Hk, N, D]
        count = keys.shape[1]
        sums = torch.cat([torch.zeros_like(keys[:, :1]), keys.cumsum(1)], dim=1)  # [Hk, N + 1, D]
        place = torch.arange(count)
        first = (place - self.memory).clamp_min(0)
        before = (sums[:, place] - sums[:, first]) / (place - first).clamp_min(1)[:, None]  # [Hk, N, D]
        distance = (keys - before).norm(dim=-1)  # [Hk, N]
        distance[:, :1] = torch.inf  # of no candidates at all, nothing
        return distance
