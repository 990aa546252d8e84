"""Programs of leverage: Gram matrix, factor and inverse, whitened lengths; see `triton` beside this file."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gram_kernel(
    directions,
    weights,
    partial,
    tokens,
    run,
    shared,
    D: tl.constexpr,
    P: tl.constexpr,
    B: tl.constexpr,
    T: tl.constexpr,
):
    """partial[r, h, i-tile, j-tile] = sum over the tokens of run r of w u_i u_j^T; only tiles with i >= j.

    directions [Hd, N, D], weights [H, N] float32, partial [runs, H, P, P] float32; grid (tiles^2, H, runs).
    """
    tiles: tl.constexpr = (P + B - 1) // B
    tile, head, part = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    i, j = tile // tiles, tile % tiles
    if i < j:
        return
    rows, columns = i * B + tl.arange(0, B), j * B + tl.arange(0, B)
    u = directions + (head // shared) * tokens * D
    w = weights + head * tokens
    total = tl.zeros([B, B], dtype=tl.float32)
    for start in range(part * run, tl.minimum(part * run + run, tokens), T):
        at = start + tl.arange(0, T)
        there = (at < tokens) & (at < part * run + run)
        left = tl.load(u + at[None, :] * D + rows[:, None], mask=there[None, :] & (rows < D)[:, None], other=0.0)
        right = tl.load(u + at[:, None] * D + columns[None, :], mask=there[:, None] & (columns < D)[None, :], other=0.0)
        weight = tl.load(w + at, mask=there, other=0.0)
        total = tl.dot(left.to(tl.float32), right.to(tl.float32) * weight[:, None], total, input_precision="tf32x3")
    heads = tl.num_programs(1)
    out = partial + (part * heads + head) * P * P
    tl.store(out + rows[:, None] * P + columns[None, :], total, mask=(rows < P)[:, None] & (columns < P)[None, :])


@triton.jit
def matrix_kernel(
    partial, ridge, loose, matrix, runs, D: tl.constexpr, P: tl.constexpr, B: tl.constexpr, LOOSE: tl.constexpr
):
    """matrix[h, i, :] = the runs added up, ridge on the diagonal, loose direction added, 1 on the padding's diagonal.

    ridge [H], loose [H, D] float64, matrix [H, P, P] float32; grid (P, H).
    """
    row, head, heads = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(1)
    columns = tl.arange(0, B)
    lower = columns <= row
    total = tl.zeros([B], dtype=tl.float64)
    for part in range(runs):
        at = (part * heads + head) * P * P + row * P + columns
        total += tl.load(partial + at, mask=lower, other=0.0).to(tl.float64)
    if LOOSE:
        here = tl.load(loose + head * D + row, mask=row < D, other=0.0)
        total += here * tl.load(loose + head * D + columns, mask=columns < D, other=0.0)
    own = tl.where(row < D, tl.load(ridge + head), 1.0)
    total += tl.where(columns == row, own, 0.0)
    tl.store(matrix + head * P * P + row * P + columns, total.to(tl.float32), mask=lower)


@triton.jit
def factor_kernel(matrix, factor, inverse, diagonal, P: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """L and L^-1 of every head's matrix, of which the lower triangle is read.

    matrix, factor, inverse [H, P, P] float32, diagonal [H, P] of L (NaN from the first pivot that is not positive on);
    grid (H,). R is the power of two that holds P. A panel of L and a row panel of L^-1 are finished one after the
    other and lie in memory, which the barriers make one thread's stores visible to the others in.
    """
    head = tl.program_id(0).to(tl.int64)
    a, low, inv = matrix + head * P * P, factor + head * P * P, inverse + head * P * P
    every, small = tl.arange(0, R), tl.arange(0, C)
    for start in range(0, P, C):
        own = start + small
        below = (every >= start) & (every < P)
        panel = tl.load(
            a + every[:, None] * P + own[None, :], mask=below[:, None] & (every[:, None] >= own[None, :]), other=0.0
        )
        corner = tl.load(a + own[:, None] * P + own[None, :], mask=own[:, None] >= own[None, :], other=0.0)
        row = tl.zeros([C, R], dtype=tl.float32)
        for done in range(0, start, C):
            before = done + small
            mine = tl.load(low + own[:, None] * P + before[None, :])  # [C, C], of the panel's own rows
            left = tl.load(low + every[:, None] * P + before[None, :], mask=below[:, None], other=0.0)
            panel -= tl.dot(left, tl.trans(mine), input_precision="ieee")
            corner -= tl.dot(mine, tl.trans(mine), input_precision="ieee")
            known = tl.load(inv + before[:, None] * P + every[None, :], mask=(every < P)[None, :], other=0.0)
            row -= tl.dot(mine, known, input_precision="ieee")
        # the corner: its factor's diagonal, and the inverse of its factor, column by column
        rest = tl.where(small[:, None] == small[None, :], 1.0, 0.0)
        corner_inverse = tl.zeros([C, C], dtype=tl.float32)
        pivots = tl.zeros([C], dtype=tl.float32)
        for c in range(C):
            column = tl.sum(tl.where(small[None, :] == c, corner, 0.0), 1)
            pivot = tl.sqrt(tl.sum(tl.where(small == c, column, 0.0), 0))
            column = tl.where(small > c, column / pivot, 0.0)
            corner -= column[:, None] * column[None, :]
            solved = tl.sum(tl.where(small[:, None] == c, rest, 0.0), 0) / pivot
            rest -= column[:, None] * solved[None, :]
            corner_inverse += tl.where(small[:, None] == c, solved[None, :], 0.0)
            pivots += tl.where(small == c, pivot, 0.0)
        tl.store(diagonal + head * P + own, pivots)
        finished = tl.dot(panel, tl.trans(corner_inverse), input_precision="ieee")
        finished = tl.where(every[:, None] >= own[None, :], finished, 0.0)
        tl.store(low + every[:, None] * P + own[None, :], finished, mask=(every < P)[:, None])
        row += tl.where(own[:, None] == every[None, :], 1.0, 0.0)
        finished_row = tl.dot(corner_inverse, row, input_precision="ieee")
        tl.store(inv + own[:, None] * P + every[None, :], finished_row, mask=(every < P)[None, :])
        tl.debug_barrier()


@triton.jit
def lengths_kernel(
    directions,
    inverse,
    doubt,
    lengths,
    doubtful,
    tokens,
    shared,
    D: tl.constexpr,
    P: tl.constexpr,
    B: tl.constexpr,
    T: tl.constexpr,
):
    """lengths[h, i] = |y|^2, y = L^-1 u_i, and doubtful[h, i] = sum_j y_j^2 doubt[h, j], both [H, N] float32.

    directions [Hd, N, D], inverse [H, P, P], doubt [H, P]; grid (token tiles, H).
    """
    head = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T)
    u = directions + (head // shared) * tokens * D
    inv = inverse + head * P * P
    total, doubted = tl.zeros([T], dtype=tl.float32), tl.zeros([T], dtype=tl.float32)
    for first in range(0, P, B):
        rows = first + tl.arange(0, B)
        whitened = tl.zeros([T, B], dtype=tl.float32)
        for start in range(0, tl.minimum(first + B, P), 32):  # L^-1 is lower triangular
            inner = start + tl.arange(0, 32)
            left = tl.load(
                u + at[:, None] * D + inner[None, :], mask=(at < tokens)[:, None] & (inner < D)[None, :], other=0.0
            )
            right = tl.load(
                inv + rows[None, :] * P + inner[:, None], mask=(rows < P)[None, :] & (inner < P)[:, None], other=0.0
            )
            whitened = tl.dot(left.to(tl.float32), right, whitened, input_precision="tf32x3")
        total += tl.sum(whitened * whitened, 1)
        doubts = tl.load(doubt + head * P + rows, mask=rows < P, other=0.0)
        doubted += tl.sum(whitened * whitened * doubts[None, :], 1)
    tl.store(lengths + head * tokens + at, total, mask=at < tokens)
    tl.store(doubtful + head * tokens + at, doubted, mask=at < tokens)
