"""Scissorhands: what recent queries kept passing over goes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvtool.kernels.attention_mass import attention_blocks
from kvtool.layer import Geometry
from kvtool.policies.parameters import check_at_least
from kvtool.policies.policy import Policy, Protection
from kvtool.view import View


@dataclass(frozen=True, eq=False)
class Passed:
    """Which of the last queries passed which token over.

    Attributes:
        tokens: [Hk, N] int64 rows, ascending.
        heads: [Hk, n, N] per query, oldest first, how many of the group's query heads passed the token over.
    """

    tokens: Tensor
    heads: Tensor


@dataclass(frozen=True)
class Scissorhands(Policy):
    """Counts how many of the last queries gave a token less than an even share of their attention, and keeps the
    tokens that were passed over least: what mattered lately will matter again.

    Paper: Scissorhands, 2305.17118. Deviations: an even share is 1/t with t the tokens live at that step,
    the query's own included, since the paper leaves open what t counts; query heads of a group are averaged
    (the paper's models have no groups); all layers share a budget, where the paper gives later ones more.
    Cost: O(H·history·N·D); memory O(Hk·history·N).

    Attributes:
        history: newest queries that count.
        recent: newest tokens that stay.
    """

    history: int = 400
    recent: int = 10

    needs: ClassVar[tuple[str, ...]] = ("recent-queries",)

    def __post_init__(self) -> None:
        check_at_least(self, 1, "history")
        check_at_least(self, 0, "recent")

    def queries_back(self, step: int) -> int:
        return min(self.history, step)

    def protection(self, budget: int) -> Protection:
        return Protection(window=self.recent)

    def start(self, geometry: Geometry) -> Passed:
        kind = torch.uint8 if geometry.group < 256 else torch.int32
        return Passed(
            torch.zeros(geometry.kv_heads, 0, dtype=torch.int64), torch.zeros(geometry.kv_heads, 0, 0, dtype=kind)
        )

    def observe(self, state: Passed, view: View) -> Passed:
        """Counts over what each step saw: retained then, and inside the layer's window. Earlier counts follow their
        tokens; those of tokens that left are dropped."""
        known = state.heads.shape[1]
        fresh = min(self.history, view.step - view.start)
        kept = min(known, self.history - fresh)
        heads = state.heads.new_zeros(view.tokens.shape[0], kept + fresh, view.tokens.shape[1])
        if kept and state.tokens.shape[1]:
            at = torch.searchsorted(state.tokens, view.tokens.contiguous()).clamp_max(state.tokens.shape[1] - 1)
            same = state.tokens.gather(1, at) == view.tokens
            earlier = state.heads[:, known - kept :].gather(2, at[:, None].expand(-1, kept, -1))
            heads[:, :kept] = earlier.masked_fill_(~same[:, None], 0)
        self._count(view, view.step - fresh, heads[:, kept:])
        return Passed(view.tokens.clone(), heads)

    def score(self, state: Any, view: View) -> Tensor:
        """[Hk, N] float64, minus the mean over the group's query heads of how often the token was passed over."""
        at = torch.searchsorted(state.tokens, view.tokens.contiguous())
        counts: Tensor = state.heads.sum(1, dtype=torch.float64)  # [Hk, tokens of the state]
        return -counts.gather(1, at) / view.geometry.group

    def _count(self, view: View, first: int, into: Tensor) -> None:
        """Write the counts of the steps first..view.step-1 into `into` [Hk, n, N]."""
        geometry = view.geometry
        steps = torch.arange(first, view.step)
        oldest = geometry.first_visible(steps)
        for block in attention_blocks(
            view.queries(first, view.step),
            view.keys,
            steps=steps,
            rows=view.tokens,
            first_visible=oldest,
            evict_step=view.evict_step,
            scale=geometry.scale,
            softcap=geometry.softcap,
            sink_logits=geometry.sink_logits,
        ):
            when, since = steps[block.queries, None], oldest[block.queries, None]  # [b, 1]
            rows, leaves = (x[:, None, block.columns] for x in (view.tokens, view.evict_step))
            live = (rows <= when) & (rows >= since) & (leaves > when)  # [Hk, b, n]
            even = 1 / live.sum(-1, keepdim=True).to(block.weights.dtype)  # the own token is live: never 1/0
            weights = block.weights.view(geometry.kv_heads, geometry.group, *block.weights.shape[1:])
            passed = (weights < even[:, None]) & live[:, None]  # [Hk, G, b, n]
            into[:, block.queries, block.columns] = passed.sum(1).to(into.dtype)
