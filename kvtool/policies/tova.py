"""TOVA: keep what the last query attends to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

from kvtool.policies.group import reduce_group
from kvtool.policies.parameters import Reducer, check_choices
from kvtool.policies.policy import Policy, Protection
from kvtool.policies.recent_attention import recent_attention
from kvtool.view import View


@dataclass(frozen=True)
class TOVA(Policy):
    """Keeps the tokens that the newest query attends to most, the same tokens in every head of a layer.

    Paper: Transformers are Multi-State RNNs, 2401.06104. Deviations: the newest token is kept
    for certain (as in kvpress); in the authors' code it competes. Cost: O(H·N·D).

    Attributes:
        heads: `layer` pools all query heads of the layer, `kv-head` those of one KV head.
        reducer: how the pooled heads combine.
        newest: `protected` or `competing`.
    """

    heads: Literal["layer", "kv-head"] = "layer"
    reducer: Reducer = "mean"
    newest: Literal["protected", "competing"] = "protected"

    needs: ClassVar[tuple[str, ...]] = ("recent-queries",)

    def __post_init__(self) -> None:
        check_choices(self)

    def protection(self, budget: int) -> Protection:
        return Protection(window=1 if self.newest == "protected" else 0)

    def score(self, state: Any, view: View) -> Tensor:
        """[Hk, N] float64, attention of the query of row step - 1."""
        attention, _ = recent_attention(view, 1)
        kv_heads = view.geometry.kv_heads
        if self.heads == "kv-head":
            return reduce_group(attention, kv_heads, self.reducer)
        return reduce_group(attention, 1, self.reducer).expand(kv_heads, -1)
