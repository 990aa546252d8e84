"""StreamingLLM: attention sinks and the newest tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from kvtool.policies.parameters import check_at_least, check_choices
from kvtool.policies.policy import Policy, Protection
from kvtool.view import View


@dataclass(frozen=True)
class StreamingLLM(Policy):
    """Keeps the first tokens, which soak up attention, and the newest ones. Everything between goes.

    Paper: Efficient Streaming Language Models with Attention Sinks, 2309.17453. Deviations: by default
    keys keep their original positions (as in kvpress), where the paper numbers positions inside the
    cache. Cost: O(Hk·N); with positions=cache evaluation rotates what is left once more.

    Attributes:
        sinks: first rows of the sequence that stay; 0 is a plain sliding window.
        positions: `original`, or `cache` as in the paper; scores are the same.
    """

    sinks: int = 4
    positions: Literal["original", "cache"] = "original"  # type: ignore[misc]

    @property
    def needs(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("rotation", "future-rotation") if self.positions == "cache" else ()

    def __post_init__(self) -> None:
        check_choices(self)
        check_at_least(self, 0, "sinks")

    def protection(self, budget: int) -> Protection:
        return Protection(sinks=self.sinks)

    def score(self, state: Any, view: View) -> Tensor:
        """[Hk, N] float64, the row itself: newer is better."""
        return view.tokens.to(torch.float64)
