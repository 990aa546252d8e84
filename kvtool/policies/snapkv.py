"""SnapKV: what the last queries of the prompt attend to, smoothed along the sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional

from kvtool.policies.group import reduce_group
from kvtool.policies.parameters import Reducer, check_at_least, check_choices
from kvtool.policies.policy import Policy, Protection
from kvtool.policies.recent_attention import recent_attention
from kvtool.view import View


@dataclass(frozen=True)
class SnapKV(Policy):
    """Lets the last queries of the prompt vote for the tokens before them, pooled along the sequence so that
    neighbours stay together. The voting window itself is kept.

    Paper: SnapKV: LLM Knows What You are Looking for Before Generation, 2404.14469. Deviations:
    one set per KV head through `group`, where the authors select per query head after repeating
    the cache. Cost: O(H·window·N·D).

    Attributes:
        window: observing queries, and newest tokens kept.
        kernel: pooling width, odd; 1 is off.
        pooling: `avg` counts the zero padding at both ends, as kvpress and the authors do.
        group: how the query heads of a KV head combine.
        order: `pool-then-reduce` pools every query head (kvpress), `reduce-then-pool` the KV head;
            they differ for max only.
    """

    window: int = 64
    kernel: int = 5
    pooling: Literal["avg", "max"] = "avg"
    group: Reducer = "mean"
    order: Literal["pool-then-reduce", "reduce-then-pool"] = "pool-then-reduce"

    needs: ClassVar[tuple[str, ...]] = ("recent-queries",)

    def queries_back(self, step: int) -> int:
        return min(self.window, step)

    def __post_init__(self) -> None:
        check_choices(self)
        check_at_least(self, 1, "window", "kernel")
        if self.kernel % 2 == 0:
            raise ValueError(f"kernel={self.kernel} should be odd, an even one shifts the scores")

    def protection(self, budget: int) -> Protection:
        return Protection(window=self.window)

    def score(self, state: Any, view: View) -> Tensor:
        """[Hk, N] float64, mean over the window's queries; 0 for the window's own tokens, which are protected."""
        kv_heads = view.geometry.kv_heads
        votes, voters = recent_attention(view, self.window)
        before = int((view.tokens < view.step - self.window).sum(1).max())
        past = votes[:, :before] / voters  # [H, n], tokens are ascending: these are the ones before the window
        if self.order == "pool-then-reduce":
            pooled = reduce_group(self._pool(past), kv_heads, self.group)
        else:
            pooled = self._pool(reduce_group(past, kv_heads, self.group))
        scores = torch.zeros(view.tokens.shape, dtype=torch.float64)
        scores[:, :before] = pooled
        return scores

    def _pool(self, scores: Tensor) -> Tensor:
        """[heads, n] smoothed along n."""
        if self.kernel == 1 or scores.shape[1] == 0:
            return scores
        pool = functional.avg_pool1d if self.pooling == "avg" else functional.max_pool1d
        return pool(scores[None], self.kernel, stride=1, padding=self.kernel // 2)[0]
