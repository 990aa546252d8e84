"""oracle-caote: keep what the future's outputs would miss most."""

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
class OracleCAOTE(Policy):
    """Scores a token by the squared error that the evaluated outputs would suffer if it alone left the full cache,
    which is exactly (a / (1 - a))^2 |v - f|^2. It reads the future.

    Paper: the leave-one-out error of CAOTE, 2504.14051, on future instead of past queries.
    Deviations: none beyond that. Cost: O(H·F·T·(D + Dv)) for F evaluated steps, blockwise, in float64.
    """

    oracle: ClassVar[bool] = True

    def score(self, state: Any, view: View) -> Tensor:
        """[Hk, N] float64, summed over the group's query heads and the evaluated steps; +inf where a = 1."""
        geometry = view.geometry
        future, blocks = future_attention(view, torch.float64)
        values = future.layer.values.to(torch.float64)  # [Hk, T, Dv]
        centre = values[:, : view.step].mean(1, keepdim=True)
        values = values - centre  # distances do not change, their cancellation shrinks
        damage = torch.zeros(geometry.query_heads, future.layer.tokens, dtype=torch.float64)
        for block in blocks:
            v = values[:, block.columns]  # [Hk, n, Dv]
            a = block.weights.reshape(geometry.kv_heads, -1, v.shape[1])  # [Hk, G*b, n]
            f = a @ v - (1 - a.sum(2, keepdim=True)) * centre  # [Hk, G*b, Dv]; a sink logit holds weight back
            distance = torch.baddbmm(v.square().sum(2)[:, None, :], f, v.transpose(1, 2), alpha=-2)
            distance.add_(f.square().sum(2, keepdim=True)).clamp_min_(0)
            # where one token has nearly all the weight, f is nearly its value: the difference itself is exact
            most, top = a.max(2, keepdim=True)
            at_top = v.gather(1, top.expand(-1, -1, v.shape[2]))
            distance.scatter_(2, top, (at_top - f).square_().sum(2, keepdim=True))
            loss = distance.mul_(a.div_(1 - a).square_())
            if bool((most >= 1).any()):  # only the largest weight of a query can be 1
                loss.scatter_(2, top, loss.gather(2, top).masked_fill_(most >= 1, torch.inf))
            damage[:, block.columns] += loss.view(block.weights.shape).sum(1)
        return reduce_group(damage, geometry.kv_heads, "sum").gather(1, view.tokens)
