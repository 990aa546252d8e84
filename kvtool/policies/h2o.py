"""H2O: heavy hitters of accumulated attention, and a recent half."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from kvtool.layer import Geometry
from kvtool.policies.attention_history import extend_history, history_of_candidates, no_history
from kvtool.policies.group import reduce_group
from kvtool.policies.parameters import Reducer, check_choices, check_share, share_of
from kvtool.policies.policy import Policy, Protection
from kvtool.view import View


@dataclass(frozen=True)
class H2O(Policy):
    """Sums the attention every token has received from all queries so far and keeps the heaviest.
    Part of the budget is set aside for the newest tokens, which had no time to collect any.

    Paper: H2O: Heavy-Hitter Oracle, 2306.14048, the streaming form: each step's softmax runs over
    what was live at that step. Deviations: heads of a group share a set through `group` (the
    paper's models have no groups). Cost: O(H·e^2·D) once, O(H·N·D) per later step; memory
    O(H·e) beside one block.

    Attributes:
        recent: share of the budget for the newest tokens, rounded down; the rest is for heavy hitters.
        group: how the query heads of a KV head combine.
    """

    recent: float = 0.5
    group: Reducer = "mean"

    nested: ClassVar[bool] = False
    needs: ClassVar[tuple[str, ...]] = ("prompt-queries",)

    def __post_init__(self) -> None:
        check_choices(self)
        check_share(self, "recent")

    def protection(self, budget: int) -> Protection:
        return Protection(window=share_of(budget, self.recent))

    def start(self, geometry: Geometry) -> Tensor:
        return no_history(geometry)

    def observe(self, state: Tensor, view: View) -> Tensor:
        return extend_history(state, view)

    def score(self, state: Any, view: View) -> Tensor:
        """[Hk, N] float64, accumulated attention."""
        return reduce_group(history_of_candidates(state, view), view.geometry.kv_heads, self.group)
