"""Splits: every subset of few tokens, by kvtool's exact search."""

from __future__ import annotations

import torch
from torch import Tensor

from kvtool.decomposition.all_subsets import subset_damages
from kvtool.decomposition.subpools import SubPool


def all_damages(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """[2^n] float64, damage of the subset whose members are the bits of its index; infinite for the empty one."""
    dim = keys.shape[1]
    return subset_damages(
        SubPool(
            queries=queries[None],
            keys=keys,
            values=values,
            rows=torch.arange(keys.shape[0]),
            scale=scale,
            softcap=None,
            sink_logits=None,
            mean=queries[None].mean(1),
            covariance=torch.eye(dim, dtype=torch.float64)[None],
            objective=None,
            one_shot=torch.arange(1),
        )
    )
