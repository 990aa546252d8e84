"""Attention mass in plain torch: column sums of attention over many queries, blockwise.

The full [H, R, N] matrix never exists: at 16k tokens and 8 heads it would take 8.6 GB.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

TILE_BYTES = 16 << 20  # logits of one block; as much again for its weights
MASS_BYTES = 8 << 20  # the same where the weights are only summed: one KV head at a time, or several small ones
MASS_ROWS = 512  # query rows of one KV head at a time: more make a causal block wider than it is full


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
    dtype = torch.promote_types(queries.dtype, torch.float32)
    keys, rows = keys.to(dtype), rows.expand(kv_heads, candidates)
    if block is None:
        block = max(1, TILE_BYTES // max(1, heads * candidates * dtype.itemsize))
    sinks = None if sink_logits is None else sink_logits.to(dtype).view(kv_heads, -1, 1)
    every = slice(0, kv_heads)
    for start in range(0, count, block):
        chosen = slice(start, min(start + block, count))
        when, since = steps[chosen], first_visible[chosen]
        columns = _seen_columns(rows, int(since.min()), int(when.max()))
        left = None if evict_step is None else evict_step[:, columns]
        q = queries[:, chosen].to(dtype) * scale
        weights = q.new_empty(2, heads * len(when) * (columns.stop - columns.start))
        found = _weights(q, keys[:, columns], rows[:, columns], when, since, left, softcap, sinks, every, weights)
        yield AttentionBlock(chosen, columns, found)


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
    heads, count, _ = queries.shape
    kv_heads, candidates, _ = keys.shape
    group, dtype = heads // kv_heads, torch.promote_types(queries.dtype, torch.float32)
    rows = rows.expand(kv_heads, candidates)
    mass = torch.zeros(heads, candidates, dtype=torch.float64, device=keys.device)
    if block is None:
        block = max(1, min(MASS_ROWS, MASS_BYTES // max(1, candidates * dtype.itemsize)) // group)
    block = max(1, min(block, count))
    at_once = max(1, min(kv_heads, MASS_BYTES // max(1, group * block * candidates * dtype.itemsize)))  # KV heads
    sinks = None if sink_logits is None else sink_logits.to(dtype).view(kv_heads, group, 1)
    # fresh memory for every block would cost as much as the arithmetic
    room = torch.empty(2, at_once * group * block * candidates, dtype=dtype, device=keys.device)
    for first in range(0, kv_heads, at_once):
        some = slice(first, min(first + at_once, kv_heads))
        own = slice(some.start * group, some.stop * group)
        these, here = keys[some].to(dtype), rows[some]
        left = None if evict_step is None else evict_step[some]
        for start in range(0, count, block):
            chosen = slice(start, min(start + block, count))
            when, since = steps[chosen], first_visible[chosen]
            columns = _seen_columns(here, int(since.min()), int(when.max()))
            gone = None if left is None else left[:, columns]
            q = queries[own, chosen].to(dtype) * scale
            found = _weights(q, these[:, columns], here[:, columns], when, since, gone, softcap, sinks, some, room)
            mass[own, columns] += found.sum(1)
    return mass


def _weights(
    queries: Tensor,
    keys: Tensor,
    rows: Tensor,
    steps: Tensor,
    first_visible: Tensor,
    evict_step: Tensor | None,
    softcap: float | None,
    sinks: Tensor | None,
    which: slice,
    room: Tensor,
) -> Tensor:
    """[h·G, b, n] attention weights of the scaled `queries` [h·G, b, D] over the columns of `keys` [h, n, D].

    Args:
        sinks: [Hk, G, 1] or None.
        which: the h KV heads.
        room: [2, at least h·G·b·n], overwritten; the result lies in it.
    """
    kv_heads, width, _ = keys.shape
    heads, count, _ = queries.shape
    per_head = heads // kv_heads * count
    logits, weights = room[:, : heads * count * width].view(2, kv_heads, per_head, width)  # [h, G·b, n]
    torch.bmm(queries.reshape(kv_heads, per_head, queries.shape[2]), keys.transpose(1, 2), out=logits)
    if softcap is not None:
        logits.div_(softcap).tanh_().mul_(softcap)
    shaped = (kv_heads, heads // kv_heads, count, width)
    empty = _mask(logits.view(shaped), rows, steps, first_visible, evict_step)
    torch.softmax(logits, dim=-1, out=weights)
    logits, weights = logits.view(shaped), weights.view(shaped)
    if sinks is not None and width:
        # exp z / (exp b + sum exp z) = softmax · sigmoid(lse - b): no overflow whichever is larger. The largest
        # weight is exp(max z - lse).
        total = logits.amax(-1) - weights.amax(-1).log()
        weights.mul_(torch.sigmoid(total - sinks[which])[..., None])
    if empty is not None:
        weights.masked_fill_(empty, 0.0)
    return weights.view(heads, count, width)


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
