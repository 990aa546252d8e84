"""Attention mass in plain torch: column sums of attention over many queries, blockwise.

The full [H, R, N] matrix never exists: at 16k tokens and 8 heads it would take 8.6 GB.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

TILE_BYTES = 64 << 20  # logits of one block; two or three tensors of this size live at once


@dataclass(frozen=True, eq=False)
class AttentionBlock:
    """Attention weights of a run of queries over the run of columns that any of them sees.

    Attributes:
        queries: slice into R.
        columns: slice into N; every other column has weight 0 for these queries.
        weights: [H, b, n].
    """

    queries: slice
    columns: slice
    weights: Tensor


def attention_blocks(
    queries: Tensor,
    keys: Tensor,
    *,
    steps: Tensor,
    rows: Tensor,
    first_visible: Tensor,
    evict_step: Tensor | None = None,
    scale: float,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    block: int | None = None,
) -> Iterator[AttentionBlock]:
    """Softmax weights, block of queries by block of queries.

    The query of step t gives weight to token i only if first_visible[t] <= i <= t and
    t < evict_step[i]; a query that sees nothing gives none. Masked keys may hold anything.

    Args:
        queries: [H, R, D]; query head h reads KV head h // (H / Hk).
        keys: [Hk, N, D].
        steps: [R] int64, the row of each query.
        rows: [N] or [Hk, N] int64, the row of each key, ascending.
        first_visible: [R] int64, the oldest row each query sees.
        evict_step: [Hk, N] int64, or None where nothing was evicted.
        scale, softcap: logit z = scale·q·k, then softcap·tanh(z / softcap).
        sink_logits: [H], a logit without a key in the denominator.
        block: queries per block; by default as many as fit into 64 MiB of logits.

    Yields:
        blocks in query order, in float32 or wider.
    """
    heads, count, _ = queries.shape
    kv_heads, candidates, _ = keys.shape
    group = heads // kv_heads
    dtype = torch.promote_types(queries.dtype, torch.float32)
    keys = keys.to(dtype)
    rows = rows.expand(kv_heads, candidates)
    if block is None:
        block = max(1, TILE_BYTES // max(1, heads * candidates * dtype.itemsize))
    for start in range(0, count, block):
        chosen = slice(start, min(start + block, count))
        when, since = steps[chosen], first_visible[chosen]
        columns = _seen_columns(rows, int(since.min()), int(when.max()))
        seen = rows[:, columns]  # [Hk, n]
        q = (queries[:, chosen].to(dtype) * scale).reshape(kv_heads, -1, queries.shape[2])  # [Hk, G*b, D]
        logits = (q @ keys[:, columns].transpose(1, 2)).view(kv_heads, group, len(when), -1)  # [Hk, G, b, n]
        if softcap is not None:
            logits = logits.div_(softcap).tanh_().mul_(softcap)
        left = None if evict_step is None else evict_step[:, columns]
        empty = _mask(logits, seen, when, since, left)
        weights = torch.softmax(logits, dim=-1)
        if empty is not None:
            weights.masked_fill_(empty, 0.0)
        if sink_logits is not None:
            # exp z / (exp b + sum exp z) = softmax · sigmoid(lse - b): no overflow whichever is larger
            sink = sink_logits.to(dtype).view(kv_heads, group, 1)
            share = torch.sigmoid(torch.logsumexp(logits, dim=-1) - sink)
            weights.mul_(share[..., None])
        yield AttentionBlock(chosen, columns, weights.view(heads, len(when), -1))


def attention_mass(
    queries: Tensor,
    keys: Tensor,
    *,
    steps: Tensor,
    rows: Tensor,
    first_visible: Tensor,
    evict_step: Tensor | None = None,
    scale: float,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    block: int | None = None,
) -> Tensor:
    """[H, N] float64, attention that each token receives from all queries together.

    Arguments as for `attention_blocks`. Accumulated in float64: in 16 bits such sums stop
    growing after a few hundred steps, and late tokens could never win.
    """
    mass = torch.zeros(queries.shape[0], keys.shape[1], dtype=torch.float64, device=keys.device)
    for part in attention_blocks(
        queries,
        keys,
        steps=steps,
        rows=rows,
        first_visible=first_visible,
        evict_step=evict_step,
        scale=scale,
        softcap=softcap,
        sink_logits=sink_logits,
        block=block,
    ):
        mass[:, part.columns] += part.weights.sum(1)
    return mass


def _seen_columns(rows: Tensor, oldest: int, newest: int) -> slice:
    """The run of columns that holds every row in oldest..newest, over all KV heads."""
    inside = ((rows >= oldest) & (rows <= newest)).any(0).nonzero()[:, 0]
    return slice(int(inside[0]), int(inside[-1]) + 1) if inside.numel() else slice(0, 0)


def _mask(
    logits: Tensor, rows: Tensor, steps: Tensor, first_visible: Tensor, evict_step: Tensor | None
) -> Tensor | None:
    """Write -inf where a query does not see a token, in place.

    Only columns that some query of the block misses are touched: in a causal block these are
    its own diagonal, a small part of the tile.

    Returns:
        [Hk, 1, b, 1] bool, queries that see nothing; None where every query sees something.
    """
    missed = (rows > steps.min()) | (rows < first_visible.max())  # [Hk, n]
    if evict_step is not None:
        missed = missed | (evict_step <= steps.max())
    partial = missed.any(0).nonzero()[:, 0]
    if partial.numel() == 0 and rows.shape[1]:
        return None
    low, high = (int(partial[0]), int(partial[-1]) + 1) if partial.numel() else (0, 0)
    window = rows[:, None, low:high]  # [Hk, 1, n']
    hidden = (window > steps[:, None]) | (window < first_visible[:, None])  # [Hk, b, n']
    if evict_step is not None:
        hidden |= evict_step[:, None, low:high] <= steps[:, None]
    logits[..., low:high].masked_fill_(hidden[:, None], -torch.inf)
    if high - low < rows.shape[1]:
        return None
    return hidden.all(-1)[:, None, :, None]
