"""The Triton kernel of retained attention: both sides of many cuts in one walk over K and V."""

from __future__ import annotations

import triton
import triton.language as tl

from kvtool.kernels.attention_mass.logit_tile import (
    NEVER,
    NOTHING,
    finite_shift,
    load_columns,
    load_rows,
    scaled,
    sees,
)


@triton.jit
def add_weighted(weights, values, total, PRECISION: tl.constexpr, UNIT: tl.constexpr):
    """total + weights @ values, [m, n] float32 weights in 0..1 and [n, d] values of any dtype.

    Sixteen-bit values take the weights in two terms, since one would round them to 8 or 11 bits: together
    they hold 16 or 22. UNIT lifts float16 weights out of the subnormal numbers.
    """
    if values.dtype == tl.float32:
        return tl.dot(weights, values, total, input_precision=PRECISION)
    weights = weights * UNIT
    high = weights.to(values.dtype)
    low = (weights - high.to(tl.float32)).to(values.dtype)
    total = tl.dot(high, values, total, input_precision=PRECISION)
    return tl.dot(low, values, total, input_precision=PRECISION)


@triton.jit
def retained_kernel(
    queries,
    keys,
    values,
    evict_steps,
    steps,
    first_visible,
    rows,
    low,
    high,
    sinks,
    odds,
    sums,
    errors,
    outputs,
    count,
    tokens,
    cells,
    scale,
    softcap,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    DV: tl.constexpr,
    WIDTH: tl.constexpr,
    CELLS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    VECTORS: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Grid (groups of cells, blocks of query rows, Hk).

    In: queries [H, R, D], keys [Hk, N, D], values [Hk, N, Dv], evict_steps [C, Hk, N], steps and first_visible [R],
    rows [N], low and high [blocks] the tiles of keys to walk over, sinks [H].
    Out: odds [C, H, R], log of evicted over retained mass; sums [5, C, H, R], |f_V|^2, |d|^2, |d across f_V|^2,
    f_V·f_R and |f_R|^2 with d = fE - f_R; errors [C, H, R, Dv], e = m d; outputs [H, R, Dv], f_V.
    """
    first_cell = tl.program_id(0) * CELLS
    block = tl.program_id(1)
    kv_head = tl.program_id(2)
    kv_heads = tl.num_programs(2)
    line = block * BLOCK_M + tl.arange(0, BLOCK_M)  # row of the block: the steps in order, each with its group
    real = line < count * GROUP
    at = line // GROUP
    head = kv_head * GROUP + line % GROUP
    place = head * count + at  # [m] in [H, R]; what is written has fewer than 2^31 numbers
    step = tl.load(steps + at, mask=real, other=-1)
    first = tl.load(first_visible + at, mask=real, other=NEVER)
    query = load_rows(queries, place.to(tl.int64), real, 0, D1, D, UPCAST)
    if D2 > 0:
        query_rest = load_rows(queries, place.to(tl.int64), real, D1, D2, D, UPCAST)
    keys += kv_head.to(tl.int64) * tokens * D
    values += kv_head.to(tl.int64) * tokens * DV

    tops, denominators, totals = (), (), ()
    for _ in tl.static_range(2 * CELLS):
        tops += (tl.full([BLOCK_M], NOTHING, tl.float32),)
        denominators += (tl.zeros([BLOCK_M], tl.float32),)
        totals += (tl.zeros([BLOCK_M, WIDTH], tl.float32),)

    for tile in range(tl.load(low + block), tl.load(high + block)):
        column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = column < tokens
        row = tl.load(rows + column, mask=inside, other=NEVER)
        key = load_columns(keys, column, inside, 0, D1, D, UPCAST)
        logits = tl.dot(query, key, input_precision=PRECISION)
        if D2 > 0:
            key_rest = load_columns(keys, column, inside, D1, D2, D, UPCAST)
            logits = tl.dot(query_rest, key_rest, logits, input_precision=PRECISION)
        logits = scaled(logits, scale, softcap, SOFTCAP)
        logits = tl.where(sees(row, step, first), logits, NOTHING)
        value = load_rows(values, column, inside, 0, WIDTH, DV, UPCAST)
        new_tops, new_denominators, new_totals = (), (), ()
        for c in tl.static_range(CELLS):
            cell = tl.minimum(first_cell + c, cells - 1)  # beyond the last cell: that one again, never written
            leaves = tl.load(
                evict_steps + (cell * kv_heads + kv_head).to(tl.int64) * tokens + column, mask=inside, other=NEVER
            )
            stays = step[:, None] < leaves[None, :]
            top_kept = tl.maximum(tops[2 * c], tl.max(tl.where(stays, logits, NOTHING), 1))
            top_gone = tl.maximum(tops[2 * c + 1], tl.max(tl.where(stays, NOTHING, logits), 1))
            shift_kept, shift_gone = finite_shift(top_kept), finite_shift(top_gone)
            weights = tl.exp(logits - tl.where(stays, shift_kept[:, None], shift_gone[:, None]))  # 0 where unseen
            shrink = tl.exp(tops[2 * c] - shift_kept)
            part = tl.where(stays, weights, 0.0)
            new_denominators += (denominators[2 * c] * shrink + tl.sum(part, 1),)
            new_totals += (add_weighted(part, value, totals[2 * c] * shrink[:, None], PRECISION, UNIT),)
            shrink = tl.exp(tops[2 * c + 1] - shift_gone)
            part = tl.where(stays, 0.0, weights)
            new_denominators += (denominators[2 * c + 1] * shrink + tl.sum(part, 1),)
            new_totals += (add_weighted(part, value, totals[2 * c + 1] * shrink[:, None], PRECISION, UNIT),)
            new_tops += (top_kept, top_gone)
        tops, denominators, totals = new_tops, new_denominators, new_totals

    lines = kv_heads * GROUP * count  # H R
    width = tl.arange(0, WIDTH)
    for c in tl.static_range(CELLS):
        cell = tl.zeros([BLOCK_M], tl.int32) + (first_cell + c)  # [m]: the interpreter splats no scalar condition
        write = real & (cell < cells)
        top, denominator = tops[2 * c], denominators[2 * c]
        lost = denominators[2 * c + 1]
        seen_kept = denominator != 0.0  # a NaN counts as seen
        ratio = tl.full([BLOCK_M], 1.0, tl.float32)
        if SINKS:
            sink = tl.load(sinks + head, mask=real, other=0.0)
            with_sink = tl.maximum(top, sink)
            shift = finite_shift(with_sink)
            ratio = tl.exp(top - shift)
            denominator = denominator * ratio + tl.exp(sink - shift)
            top = with_sink
        # From log-sum-exps, the maxima subtracted first: exact where both logits are large.
        odd = (finite_shift(tops[2 * c + 1]) - finite_shift(top)) + (tl.log(lost) - tl.log(denominator))
        odd = tl.where(denominator == 0.0, float("inf"), odd)
        odd = tl.where(lost == 0.0, NOTHING, odd)
        kept_mean = totals[2 * c] * tl.where(seen_kept, ratio / denominator, 0.0)[:, None] * (1.0 / UNIT)
        gone_mean = totals[2 * c + 1] * tl.where(lost != 0.0, 1.0 / lost, 0.0)[:, None] * (1.0 / UNIT)
        mass, rest = 1.0 / (1.0 + tl.exp(-odd)), 1.0 / (1.0 + tl.exp(odd))
        whole = rest[:, None] * kept_mean + mass[:, None] * gone_mean
        difference = tl.where((lost != 0.0)[:, None], gone_mean - kept_mean, 0.0)
        square = tl.sum(whole * whole, 1)
        along = tl.where(square == 0.0, 0.0, tl.sum(whole * difference, 1) / square)
        across = difference - along[:, None] * whole
        target = cell * lines + place
        tl.store(odds + target, odd, mask=write)
        tl.store(sums + target, square, mask=write)
        sums_one = sums + cells * lines
        tl.store(sums_one + target, tl.sum(difference * difference, 1), mask=write)
        sums_one += cells * lines
        tl.store(sums_one + target, tl.sum(across * across, 1), mask=write)
        sums_one += cells * lines
        tl.store(sums_one + target, tl.sum(whole * kept_mean, 1), mask=write)
        sums_one += cells * lines
        tl.store(sums_one + target, tl.sum(kept_mean * kept_mean, 1), mask=write)
        if VECTORS:
            slot = target[:, None] * DV + width[None, :]
            shown = write[:, None] & (width < DV)[None, :]
            tl.store(errors + slot, mass[:, None] * difference, mask=shown)
            tl.store(outputs + place[:, None] * DV + width[None, :], whole, mask=shown & (cell == 0)[:, None])
