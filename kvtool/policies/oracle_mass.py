"""oracle-mass: keep what the future will attend to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvtool.policies.future_attention import future_attention
from kvtool.policies.group import reduce_group
from kvtool.policies.policy import Policy
from kvtool.view import View


@dataclass(frozen=True)
class OracleMass(Policy):
    """Keeps the tokens of largest attention mass over the steps that will be evaluated: no policy can retain more.
    It reads the future, and most mass need not mean least error.

    Paper: none. Deviations: none. Cost: O(H·F·T·D) for F evaluated steps, blockwise.
    """

    oracle: ClassVar[bool] = True

    def score(self, state: Any, view: View) -> Tensor:
        """[Hk, N] float64, sum over the group's query heads and the evaluated steps of full-cache weights."""
        geometry = view.geometry
        future, blocks = future_attention(view, torch.promote_types(view.dtype, torch.float32))
        mass = torch.zeros(geometry.query_heads, future.layer.tokens, dtype=torch.float64)
        for block in blocks:
            mass[:, block.columns] += block.weights.sum(1, dtype=torch.float64)
        return reduce_group(mass, geometry.kv_heads, "sum").gather(1, view.tokens)
