"""Splits: every subset of few tokens, by kvtool's exact search."""

from __future__ import annotations

import torch
from torch import Tensor

from kvtool.decomposition.damage import Damage
from kvtool.decomposition.search import members, subsets
from kvtool.decomposition.subpools import SubPool


def all_damages(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """[2^n] float64, damage of the subset whose members are the bits of its index; NaN for the empty one."""
    tokens = keys.shape[0]
    dim = keys.shape[1]
    pool = SubPool(
        queries[None],
        keys,
        values,
        torch.arange(tokens),
        scale,
        None,
        None,
        queries[None].mean(1),
        torch.eye(dim, dtype=torch.float64)[None],
        None,
        torch.arange(1),
    )
    damage = Damage(pool)
    found = torch.full((2**tokens,), float("nan"), dtype=torch.float64)
    bits = 2 ** torch.arange(tokens)
    for keep in range(1, tokens + 1):
        numbers = (members(subsets(tokens, keep), tokens) * bits).sum(1)
        found[numbers] = damage.bounds(keep)
    return found
