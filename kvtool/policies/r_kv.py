"""R-KV: what recent queries attend to, minus what the cache holds twice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional

from kvtool.policies.parameters import check_at_least, check_choices, check_share
from kvtool.policies.policy import Policy, Protection
from kvtool.view import View

TILE_BYTES = 8 << 20  # cosines of one block of keys to all others
STRIP = 1024  # keys among which near-duplicates are looked for at a time, the newest first


@dataclass(frozen=True)
class RKV(Policy):
    """Weighs the attention of the last queries against redundancy, the mean cosine of a key to all others; of
    near-duplicates the newest is spared. Made for long reasoning, where models repeat themselves.

    Paper: R-KV: Redundancy-aware KV Cache Compression for Reasoning Models, 2505.24133. Deviations: where
    no key is similar enough nothing is spared (the authors' code then spares token 0); a sink logit, which
    the authors' models lack, is one more column of the softmax. As in that code, every KV head chooses its
    own tokens. Cost: O(H·window·N·D + Hk·N^2·D); memory O(block·N).

    Attributes:
        window: observing queries, and newest tokens kept.
        balance: the paper's lambda, the share of attention in the score; the rest is redundancy.
        kernel: width of the max pooling of attention, odd; 1 is off.
        threshold: cosine above which keys are near-duplicates.
        group: how the logits of a KV head's query heads combine, before the softmax.
    """

    window: int = 8
    balance: float = 0.1
    kernel: int = 7
    threshold: float = 0.5
    group: Literal["max", "mean"] = "max"

    needs: ClassVar[tuple[str, ...]] = ("recent-queries",)

    def __post_init__(self) -> None:
        check_choices(self)
        check_at_least(self, 1, "window", "kernel")
        check_at_least(self, -1, "threshold")
        check_share(self, "balance")
        if self.kernel % 2 == 0:
            raise ValueError(f"kernel={self.kernel} should be odd, an even one shifts the scores")

    def queries_back(self, step: int) -> int:
        return min(self.window, step)

    def protection(self, budget: int) -> Protection:
        return Protection(window=self.window)

    def score(self, state: Any, view: View) -> Tensor:
        """[Hk, N] float64, balance · importance - (1 - balance) · redundancy; the window's own tokens, which are
        protected, have no importance."""
        scores = torch.empty(view.tokens.shape, dtype=torch.float64)
        for head in range(view.geometry.kv_heads):
            redundant = torch.softmax(mean_cosines(view.keys[head], self.threshold), dim=0)
            scores[head] = -(1 - self.balance) * redundant
        before = int((view.tokens < view.step - self.window).sum(1).max())  # ascending: those before the window
        if before:
            scores[:, :before] += self.balance * self._importance(view, before)
        return scores

    def _importance(self, view: View, before: int) -> Tensor:
        """[Hk, before] float64: mean over the last queries of their attention to the tokens before the window, as if
        there were no others, max-pooled along the tokens."""
        geometry = view.geometry
        first = max(0, view.step - self.window)
        steps = torch.arange(first, view.step)
        queries = view.queries(first, view.step).reshape(geometry.kv_heads, -1, geometry.key_dim)
        logits = geometry.scale * (queries @ view.keys[:, :before].transpose(1, 2)).to(torch.float64)
        if geometry.softcap is not None:
            logits = geometry.softcap * torch.tanh(logits / geometry.softcap)
        logits = self._combined(logits.view(geometry.kv_heads, geometry.group, len(steps), before))
        rows = view.tokens[:, None, :before]
        outside = rows >= view.step - self.window  # heads may differ in how many they still hold
        hidden = outside | (rows < geometry.first_visible(steps)[:, None])  # [Hk, w, n]
        logits = logits.masked_fill(hidden, -torch.inf)
        total = torch.logsumexp(logits, dim=-1, keepdim=True)
        if geometry.sink_logits is not None:
            sinks = geometry.sink_logits.to(torch.float64).view(geometry.kv_heads, geometry.group, 1, 1)
            total = torch.logaddexp(total, self._combined(sinks))
        attention = torch.where(hidden, 0.0, torch.exp(logits - total)).mean(1)
        pooled = functional.max_pool1d(attention[None], self.kernel, stride=1, padding=self.kernel // 2)[0]
        return pooled.masked_fill(outside[:, 0], 0.0)

    def _combined(self, logits: Tensor) -> Tensor:
        """[Hk, G, ...] -> [Hk, ...]."""
        return logits.amax(1) if self.group == "max" else logits.mean(1)


def mean_cosines(keys: Tensor, threshold: float, block: int | None = None) -> Tensor:
    """[N] float64, mean over all keys i of the cosine of i and j, for every key j.

    A key's cosine to itself counts 0, and so does that of every i to the newest j above `threshold`: the
    newest of near-duplicates does not pay for the others. A key of length zero has cosine 0.

    Args:
        keys: [N, D] of one KV head, in the order of their rows.
        block: rows of cosines that exist at a time; None chooses.
    """
    count = len(keys)
    unit = functional.normalize(keys, dim=-1)
    total = torch.zeros(count, dtype=torch.float64)
    block = block or max(1, TILE_BYTES // max(1, count * unit.element_size()))
    room = unit.new_empty(min(block, count), count)  # fresh memory for every block costs as much as the product
    for start in range(0, count, block):
        own = torch.arange(start, min(start + block, count))
        cosines = room[: len(own)]
        torch.mm(unit[start : start + block], unit.T, out=cosines)
        cosines[own - start, own] = 0.0
        _spare_newest(cosines, own, threshold)
        total += cosines.sum(0, dtype=torch.float64)
    return total / count


def _spare_newest(cosines: Tensor, own: Tensor, threshold: float) -> None:
    """Write 0 over the newest cosine above `threshold` of every row of `cosines` [b, N], where it has one.

    Args:
        own: [b], the column of each row's own key, which is no near-duplicate.
    """
    left = torch.arange(len(own))  # rows that have found none yet
    for stop in range(cosines.shape[1], 0, -STRIP):
        low = max(0, stop - STRIP)
        near = cosines[left, low:stop] > threshold
        inside = ((own[left] >= low) & (own[left] < stop)).nonzero()[:, 0]
        near[inside, own[left[inside]] - low] = False  # a threshold below 0 must not make a key its own duplicate
        newest = stop - low - 1 - near.flip(1).to(torch.uint8).argmax(1)
        found = near.gather(1, newest[:, None])[:, 0]
        cosines[left[found], low + newest[found]] = 0.0
        left = left[~found]
        if len(left) == 0:
            return
