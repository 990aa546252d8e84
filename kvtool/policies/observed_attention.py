"""ObservedAttention: average attention received, per query that could see the token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvtool.layer import Geometry
from kvtool.policies.attention_history import extend_history, history_of_candidates, no_history
from kvtool.policies.group import reduce_group
from kvtool.policies.parameters import Reducer, check_choices
from kvtool.policies.policy import Policy
from kvtool.view import View


@dataclass(frozen=True)
class ObservedAttention(Policy):
    """Averages the attention a token has received over the queries that could see it. No age bonus, unlike H2O;
    the newest tokens are judged by few queries, mostly their own.

    Paper: none; kvpress's baseline of this name. Deviations: on layers with a window only the
    queries inside it count, in the sum and in the divisor. Cost: as H2O.

    Attributes:
        group: how the query heads of a KV head combine.
    """

    group: Reducer = "mean"

    needs: ClassVar[tuple[str, ...]] = ("prompt-queries",)

    def __post_init__(self) -> None:
        check_choices(self)

    def start(self, geometry: Geometry) -> Tensor:
        return no_history(geometry)

    def observe(self, state: Tensor, view: View) -> Tensor:
        return extend_history(state, view)

    def score(self, state: Any, view: View) -> Tensor:
        """[Hk, N] float64, accumulated attention over the number of queries that saw the token."""
        oldest_seen = view.geometry.first_visible(torch.arange(view.step))  # [e], never decreasing
        stop = torch.searchsorted(oldest_seen, view.tokens.contiguous(), right=True)  # first step past the window
        observers = (stop - view.tokens).to(torch.float64)  # [Hk, N], >= 1
        total = reduce_group(history_of_candidates(state, view), view.geometry.kv_heads, self.group)
        return total / observers
