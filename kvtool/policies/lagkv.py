"""LagKV: every run of tokens is judged by the run that follows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvtool.layer import Geometry
from kvtool.policies.parameters import check_at_least
from kvtool.policies.policy import Policy, Protection
from kvtool.view import View

TOGETHER = 16  # partitions that are judged at once


@dataclass(frozen=True)
class LagKV(Policy):
    """Cuts the sequence behind the sinks into partitions of `lag` rows and judges each once, when the next is
    complete: tokens whose channels, scaled to the range that the next partition spans, vary most are kept.
    Looks at no query.

    Paper: LagKV: Lag-Relative Information of the KV Cache Tells Which Tokens Are Important, 2504.04704,
    the recursive form. Deviations: the budget is one cut over all judged tokens (as in kvpress) where the
    authors cut inside every partition; a channel that is constant over the reference is left out of the
    spread (the authors divide by zero); with fewer than two partitions the newest tokens stay (as in
    kvpress) where the authors keep all. Cost: O(Hk·N·(D + Dv)), once per token.

    Attributes:
        sinks: first rows, in no partition and protected.
        lag: rows of a partition.
        ranking: score by the rank inside the partition, so that each loses the same share; off compares
            the softmax of the spreads across partitions.
    """

    sinks: int = 4
    lag: int = 128
    ranking: bool = True

    def __post_init__(self) -> None:
        check_at_least(self, 0, "sinks")
        check_at_least(self, 1, "lag")

    def protection(self, budget: int) -> Protection:
        return Protection(sinks=self.sinks)

    def start(self, geometry: Geometry) -> Tensor:
        """[Hk, 0] float64; later [Hk, rows so far], infinite where a row has not been judged."""
        return torch.zeros(geometry.kv_heads, 0, dtype=torch.float64)

    def observe(self, state: Tensor, view: View) -> Tensor:
        """Judge every partition whose reference was completed by a step of view.start..view.step-1.

        Partition p holds the rows sinks + p·lag .. sinks + (p+1)·lag - 1. It is judged at the step whose own
        token completes partition p + 1, by what is live at that very step, however the steps are observed.
        Where an event or the layer's window has already taken tokens of either partition, the others serve;
        the token of the step itself is always among the reference.
        """
        judged = torch.full((view.geometry.kv_heads, view.step), torch.inf, dtype=torch.float64)
        judged[:, : state.shape[1]] = state
        whole = max(0, view.start - self.sinks) // self.lag  # partitions complete before the run
        references = range(max(1, whole), max(0, view.step - self.sinks) // self.lag)
        together = bool(references) and _untouched(view)
        while together and references:
            some = references[:TOGETHER]
            begin = self.sinks + (some[0] - 1) * self.lag
            stretch = slice(begin, begin + (len(some) + 1) * self.lag)
            found = self._judge_together(view.keys[:, stretch], view.values[:, stretch])
            if found is None:
                break
            judged[:, begin : stretch.stop - self.lag] = found
            references = references[TOGETHER:]
        for reference in references:
            begin = self.sinks + reference * self.lag
            step = begin + self.lag - 1
            oldest = int(view.geometry.first_visible(torch.tensor(step)))
            for head, (rows, leaves) in enumerate(zip(view.tokens, view.evict_step, strict=True)):
                live = (rows >= max(begin - self.lag, oldest)) & (rows <= step) & (leaves > step)
                mine, other = (live & side for side in (rows < begin, rows >= begin))
                if bool(mine.any()):
                    judged[head, rows[mine]] = self._judge(view.keys[head], view.values[head], mine, other)
        return judged

    def score(self, state: Any, view: View) -> Tensor:
        """[Hk, N] float64: judged tokens in 0..1, the others above all of these, the newest first."""
        judged = state.gather(1, view.tokens)
        return torch.where(judged.isinf(), 2.0 + view.tokens, judged)

    def _judge(self, keys: Tensor, values: Tensor, mine: Tensor, other: Tensor) -> Tensor:
        """[n] float64, the mean over keys and values of the softmax of the spreads, or its rank over n.

        Args:
            keys, values: [N', D], [N', Dv] of one KV head.
            mine, other: [N'] bool, the n tokens that are judged and their reference.
        """
        total = sum(torch.softmax(spread(x[mine], x[other]), dim=0) for x in (keys, values)) / 2
        assert isinstance(total, Tensor)
        return self._ranked(total)

    def _judge_together(self, keys: Tensor, values: Tensor) -> Tensor | None:
        """[Hk, P·lag] float64, what `_judge` says of the first P of P + 1 partitions, each by the next; None where a
        channel has no range in one of them.

        Args:
            keys, values: [Hk, (P + 1)·lag, D], [Hk, (P + 1)·lag, Dv].
        """
        total = torch.zeros((), dtype=torch.float64)
        for x in (keys, values):
            parts = x.to(torch.float64).unflatten(1, (-1, self.lag))  # [Hk, P + 1, lag, D]
            low, high = torch.aminmax(parts[:, 1:], dim=2, keepdim=True)
            if not bool((high > low).all()) or x.shape[-1] < 2:
                return None
            scaled = (parts[:, :-1] - low) / (high - low)
            total = total + torch.softmax(scaled.std(dim=-1), dim=-1)
        return self._ranked(total / 2).flatten(1)

    def _ranked(self, total: Tensor) -> Tensor:
        """`total` [..., n], or its rank over n."""
        if not self.ranking:
            return total
        order = total.argsort(dim=-1, stable=True)  # of equals the newer ranks higher
        places = torch.arange(total.shape[-1], dtype=torch.float64).expand_as(total)
        return torch.empty_like(total).scatter_(-1, order, places) / total.shape[-1]


def spread(tokens: Tensor, reference: Tensor) -> Tensor:
    """[n] float64, standard deviation (n - 1) over the channels of `tokens` [n, D], each channel scaled to the range
    of `reference` [m, D]; channels without a range are left out, and fewer than two of them spread nothing."""
    low, high = (x.to(torch.float64) for x in torch.aminmax(reference, dim=0))
    ranged = high > low
    if int(ranged.sum()) < 2:
        return torch.zeros(len(tokens), dtype=torch.float64)
    scaled = (tokens.to(torch.float64)[:, ranged] - low[ranged]) / (high - low)[ranged]
    found: Tensor = scaled.std(dim=1)
    return found


def _untouched(view: View) -> bool:
    """Whether column i is row i in every head, and every row is live up to the event: nothing left yet, and the
    layer's window hides nothing."""
    rows = torch.arange(view.tokens.shape[1])
    seen = int(view.geometry.first_visible(torch.tensor(view.step - 1))) == 0
    return seen and bool((view.tokens == rows).all()) and bool((view.evict_step >= view.step).all())
