"""StreamingLLM: attention sinks and the newest tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvtool.policies.parameters import check_at_least
from kvtool.policies.policy import Policy, Protection
from kvtool.view import View


@dataclass(frozen=True)
class StreamingLLM(Policy):
    """Keeps the first tokens, which soak up attention, and the newest ones. Everything between goes.

    Paper: Efficient Streaming Language Models with Attention Sinks, 2309.17453. Deviations: keys
    keep their original positions (as in kvpress), where the paper numbers positions inside the
    cache. Cost: O(Hk·N).

    Attributes:
        sinks: first rows of the sequence that stay; 0 is a plain sliding window.
    """

    sinks: int = 4

    def __post_init__(self) -> None:
        check_at_least(self, 0, "sinks")

    def protection(self, budget: int) -> Protection:
        return Protection(sinks=self.sinks)

    def score(self, state: Any, view: View) -> Tensor:
        """[Hk, N] float64, the row itself: newer is better."""
        return view.tokens.to(torch.float64)
