"""Attention entropy: how evenly a query spreads its attention over the tokens in its cache."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from kvtool.layer import Layer

TILE_BYTES = 64 << 20


def attention_entropy(
    layer: Layer, evict_steps: Sequence[Tensor], wanted: Sequence[Iterable[int]]
) -> list[dict[int, float]]:
    """-sum a ln a in nats over the live set of a query, a its attention weights renormalised to 1 over the tokens (a
    sink logit takes no part), mean over query heads. Float64.

    Args:
        evict_steps: [Hk, T] per cell.
        wanted: per cell the steps whose queries are asked; those that are not stored are left out.

    Returns:
        Per cell step -> entropy.
    """
    geometry, stored = layer.geometry, {int(step): place for place, step in enumerate(layer.query_steps)}
    asked = [sorted(step for step in set(steps) if step in stored) for steps in wanted]
    union = sorted({step for steps in asked for step in steps})
    found: list[dict[int, float]] = [{} for _ in asked]
    if not union:
        return found
    block = max(1, TILE_BYTES // (8 * geometry.query_heads * layer.tokens))
    keys, rows = layer.keys.to(torch.float64), torch.arange(layer.tokens)
    for begin in range(0, len(union), block):
        steps = torch.tensor(union[begin : begin + block])  # [b]
        queries = layer.queries[:, [stored[step] for step in steps.tolist()]].to(torch.float64)
        grouped = queries.view(geometry.kv_heads, -1, geometry.key_dim)  # [Hk, G·b, D]
        logits = (grouped @ keys.transpose(1, 2) * geometry.scale).view(geometry.query_heads, len(steps), -1)
        if geometry.softcap is not None:
            logits = geometry.softcap * torch.tanh(logits / geometry.softcap)
        visible = (rows <= steps[:, None]) & (rows >= geometry.first_visible(steps)[:, None])  # [b, T]
        for cell, evict in enumerate(evict_steps):
            mine = torch.isin(steps, torch.tensor(asked[cell], dtype=torch.int64))
            if not bool(mine.any()):
                continue
            live = visible[mine] & (steps[mine, None] < evict[:, None, :])  # [Hk, m, T]
            mean = _entropy(logits[:, mine], live.repeat_interleave(geometry.group, 0)).mean(0)
            for step, value in zip(steps[mine].tolist(), mean.tolist(), strict=True):
                if math.isfinite(value):
                    found[cell][step] = value
    return found


def _entropy(logits: Tensor, live: Tensor) -> Tensor:
    """[H, m] from logits and mask [H, m, T]; NaN where nothing is live."""
    masked = logits.masked_fill(~live, -torch.inf)
    total = masked.logsumexp(-1, keepdim=True)
    weights = (masked - total).exp()
    return (weights * (total - logits).masked_fill(~live, 0.0)).sum(-1)
