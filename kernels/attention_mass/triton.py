"""Attention mass by Triton: the numbers of `reference.attention_mass`, on a GPU.

Two passes. The first finds every query's maximum and denominator, the query heads of a KV head together. In the
second a program owns one query head and a run of keys, and walks over the queries that can see them: a tile's column
sums are float32, their sum over tiles float64. Nothing is added atomically: results repeat bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import as_int32, expect_fitting, in_blocks, meeting, pieces
from .logit_tile import NEVER, NOTHING, finite_shift, load_columns, load_rows, scaled, sees


@triton.jit
def softmax_kernel(
    queries,
    keys,
    evict_steps,
    steps,
    first_visible,
    rows,
    low,
    high,
    sinks,
    tops,
    denominators,
    count,
    tokens,
    scale,
    softcap,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    EVICTED: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Maximum and denominator of every query, the sink's share included; grid (blocks of query rows, Hk)."""
    block = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    line = block * BLOCK_M + tl.arange(0, BLOCK_M)  # the steps in order, each with its group
    real = line < count * GROUP
    at = line // GROUP
    head = kv_head * GROUP + line % GROUP
    place = head * count + at  # [m] in [H, R]
    step = tl.load(steps + at, mask=real, other=-1)
    first = tl.load(first_visible + at, mask=real, other=NEVER)
    query = load_rows(queries, place, real, 0, D1, D, UPCAST)
    if D2 > 0:
        query_rest = load_rows(queries, place, real, D1, D2, D, UPCAST)
    keys += kv_head * tokens * D
    rows += kv_head * tokens
    bounds = kv_head * tl.num_programs(0) + block
    top = tl.full([BLOCK_M], NOTHING, tl.float32)
    denominator = tl.zeros([BLOCK_M], tl.float32)
    for tile in range(tl.load(low + bounds), tl.load(high + bounds)):
        column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = column < tokens
        row = tl.load(rows + column, mask=inside, other=NEVER)
        key = load_columns(keys, column, inside, 0, D1, D, UPCAST)
        logits = tl.dot(query, key, input_precision=PRECISION)
        if D2 > 0:
            key_rest = load_columns(keys, column, inside, D1, D2, D, UPCAST)
            logits = tl.dot(query_rest, key_rest, logits, input_precision=PRECISION)
        logits = scaled(logits, scale, softcap, SOFTCAP)
        visible = sees(row, step, first)
        if EVICTED:
            leaves = tl.load(evict_steps + kv_head * tokens + column, mask=inside, other=NEVER)
            visible = visible & (step[:, None] < leaves[None, :])
        logits = tl.where(visible, logits, NOTHING)
        higher = tl.maximum(top, tl.max(logits, 1))
        shift = finite_shift(higher)
        denominator = denominator * tl.exp(top - shift) + tl.sum(tl.exp(logits - shift[:, None]), 1)
        top = higher
    if SINKS:
        sink = tl.load(sinks + head, mask=real, other=0.0)
        higher = tl.maximum(top, sink)
        shift = finite_shift(higher)
        denominator = denominator * tl.exp(top - shift) + tl.exp(sink - shift)
        top = higher
    tl.store(tops + place, finite_shift(top), mask=real)
    tl.store(denominators + place, denominator, mask=real)


@triton.jit
def column_kernel(
    queries,
    keys,
    evict_steps,
    steps,
    first_visible,
    rows,
    low,
    high,
    tops,
    denominators,
    mass,
    count,
    tokens,
    scale,
    softcap,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SOFTCAP: tl.constexpr,
    EVICTED: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Column sums of the weights over all queries of a head; grid (blocks of keys, H)."""
    block = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    kv_head = head // GROUP
    column = block * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < tokens
    row = tl.load(rows + kv_head * tokens + column, mask=inside, other=NEVER)
    key = load_columns(keys + kv_head * tokens * D, column, inside, 0, D1, D, UPCAST)
    if D2 > 0:
        key_rest = load_columns(keys + kv_head * tokens * D, column, inside, D1, D2, D, UPCAST)
    if EVICTED:
        leaves = tl.load(evict_steps + kv_head * tokens + column, mask=inside, other=NEVER)
    queries += head * count * D
    bounds = kv_head * tl.num_programs(0) + block
    total = tl.zeros([BLOCK_N], tl.float64)
    for tile in range(tl.load(low + bounds), tl.load(high + bounds)):
        at = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        real = at < count
        step = tl.load(steps + at, mask=real, other=-1)
        first = tl.load(first_visible + at, mask=real, other=NEVER)
        query = load_rows(queries, at, real, 0, D1, D, UPCAST)
        logits = tl.dot(query, key, input_precision=PRECISION)
        if D2 > 0:
            query_rest = load_rows(queries, at, real, D1, D2, D, UPCAST)
            logits = tl.dot(query_rest, key_rest, logits, input_precision=PRECISION)
        logits = scaled(logits, scale, softcap, SOFTCAP)
        visible = sees(row, step, first)
        if EVICTED:
            visible = visible & (step[:, None] < leaves[None, :])
        top = tl.load(tops + head * count + at, mask=real, other=0.0)
        share = 1.0 / tl.load(denominators + head * count + at, mask=real, other=1.0)
        weights = tl.exp(tl.where(visible, logits, NOTHING) - top[:, None])
        # Hidden after the product too: a query that sees nothing has a denominator of 0.
        total += tl.sum(tl.where(visible, weights * share[:, None], 0.0), 0).to(tl.float64)
    tl.store(mass + head * tokens + column, total, mask=inside)


INTERPRETED = not isinstance(column_kernel, triton.JITFunction)


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
    """[H, N] float64 attention that each token receives from all queries, from tensors on one GPU.

    Args:
        queries: [H, R, D] bfloat16, float16 or float32, keys: [Hk, N, D] alike; the arithmetic is float32.
        block: not needed, since no tile of weights is ever stored; not read.
        The others as in `reference.attention_mass`, on the same device.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.
    """
    (heads, count, dim), (kv_heads, tokens, _) = queries.shape, keys.shape
    rows = rows.expand(kv_heads, tokens)
    numbers = {"steps": (steps, (count,)), "rows": (rows, (kv_heads, tokens))}
    numbers["first_visible"] = (first_visible, (count,))
    if evict_step is not None:
        numbers["evict_step"] = (evict_step, (kv_heads, tokens))
    expect_fitting({"queries": queries, "keys": keys}, numbers, softcap)
    device = queries.device
    if device.type != "cuda" and not INTERPRETED:
        raise ValueError(f"the tensors are on {device}; Triton needs them on a GPU")
    mass = torch.zeros(heads, tokens, dtype=torch.float64, device=device)
    if not count or not tokens:
        return mass
    group = heads // kv_heads
    tops = torch.empty(heads, count, dtype=torch.float32, device=device)
    denominators = torch.empty_like(tops)
    integers = [as_int32(array) for array in (steps, first_visible, rows)]
    queries, keys = queries.contiguous(), keys.contiguous()
    leaves = None if evict_step is None else as_int32(evict_step)
    sinks = None if sink_logits is None else sink_logits.to(torch.float32).contiguous()
    numbers_after = (count, tokens, float(scale), 1.0 if softcap is None else float(softcap))
    size, options = options_of(queries.dtype, dim, group)
    options |= {"SOFTCAP": softcap is not None, "EVICTED": leaves is not None}
    owner = torch.arange(count, device=device).repeat_interleave(group)  # the step of each query row
    seen = _seen(_span(first_visible[owner], steps[owner], size), rows, size, of_queries=True)
    softmax_kernel[(seen[0].shape[1], kv_heads)](
        queries,
        keys,
        leaves,
        *integers,
        *seen,
        sinks,
        tops,
        denominators,
        *numbers_after,
        SINKS=sinks is not None,
        **options,
    )
    seeing = _seen(_span(first_visible, steps, size), rows, size, of_queries=False)
    column_kernel[(seeing[0].shape[1], heads)](
        queries, keys, leaves, *integers, *seeing, tops, denominators, mass, *numbers_after, **options
    )
    return mass


def options_of(dtype: torch.dtype, dim: int, group: int) -> tuple[int, dict[str, Any]]:
    """Rows and keys of a square tile, and what both kernels are specialised on: tiles as large as spill no registers,
    known from ahead-of-time builds and not from timing."""
    first, second = pieces(dim)
    wide = dtype == torch.float32 and dim > 128
    if dtype == torch.float32:
        size = 32 if dim <= 96 else 16
    else:
        size = 64 if dim <= 128 else 32
    return size, {
        "GROUP": group,
        "D": dim,
        "D1": first,
        "D2": second,
        "BLOCK_M": size,
        "BLOCK_N": size,
        "UPCAST": INTERPRETED and dtype == torch.bfloat16,  # the interpreter multiplies the bits of bfloat16
        "PRECISION": "tf32x3" if dtype == torch.float32 and not INTERPRETED else "ieee",
        "num_warps": 8 if wide else 4,
        "num_stages": 1 if wide else 2,
    }


def _span(first_visible: Tensor, steps: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Oldest and newest row that the queries of each block can see, [blocks]."""
    return in_blocks(first_visible, size, largest=False), in_blocks(steps, size, largest=True)


def _seen(span: tuple[Tensor, Tensor], rows: Tensor, size: int, of_queries: bool) -> tuple[Tensor, Tensor]:
    """Which tiles of keys each block of queries walks over, or the other way round; int32 [Hk, blocks] each."""
    runs = []
    for head in rows if rows.stride(0) else rows[:1]:  # one pool for all, or one for each KV head
        tiles = (in_blocks(head, size, largest=False), in_blocks(head, size, largest=True))
        runs.append(meeting(*span, *tiles) if of_queries else meeting(*tiles, *span))
    first, last = (torch.stack(ends).expand(len(rows), -1).contiguous() for ends in zip(*runs, strict=True))
    return first, last
