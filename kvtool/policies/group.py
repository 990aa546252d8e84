"""Reduce scores of query heads to the KV head they share."""

from __future__ import annotations

from torch import Tensor

from kvtool.policies.parameters import Reducer


def reduce_group(scores: Tensor, kv_heads: int, reducer: Reducer) -> Tensor:
    """[H, N] -> [Hk, N]: query head h belongs to KV head h // (H / Hk)."""
    grouped = scores.view(kv_heads, scores.shape[0] // kv_heads, *scores.shape[1:])
    if reducer == "mean":
        return grouped.mean(1)
    if reducer == "max":
        return grouped.amax(1)
    return grouped.sum(1)
