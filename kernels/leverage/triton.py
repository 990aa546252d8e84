"""Leverage in Triton: weighted Gram matrices, their Cholesky factors with inverse, and the scores, on one card.

Four launches for all heads, no atomics, so the same numbers every time:

1. `_gram`: partial sums over runs of tokens of the lower tiles of sum_i w_i u_i u_i^T; dots in tf32x3;
2. `_gathered`: the runs added up in float64, with ridge and loose direction, rounded to float32;
3. `_factor`: one program a head, left-looking by panels of 16 columns: L and L^-1; dots in ieee float32;
4. `_lengths`: |L^-1 u_i|^2 of every token; dots in tf32x3.

Storage float32, bfloat16 or float16; all sums in float32 or wider. Weights and ridge are divided by the largest of
them, so that no head leaves float32's range. What float32 cannot factor soundly is handed to the float64 reference,
head by head, and said to `kvtool.kernels.device`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtool.kernels.device import Unsupported, hand_over
from kvtool.kernels.leverage import reference
from kvtool.kernels.leverage.reference import Leverage, LeverageError

# Rounding an entry of A moves it by about 6e-8 sqrt(A_aa A_bb), so with y = L^-1 u and x_j^2 = sum_a A_aa (L^-1)_ja^2
# a score w |y|^2 moves by about 6e-8 r of itself, r = sum_j y_j^2 x_j^2 / |y|^2. Measured over spectra, outlier tokens
# and outlier channels: 2 to 4 times that, up to 20 times where one token outweighs all. A cut counts scores within
# 1e-5 as near ties, and up to this r they are. (The diagonal of L alone would refuse a large channel, which is
# harmless, and pass a large token, which is not.)
MOST_MAGNIFIED = 8.0
ROUNDS = True  # policies hand over float64, and what rounding to float32 does is judged here
LEAST_PIVOT = 1e-4  # of A's own diagonal entry: below it, what is left of it is rounding
PANEL = 16
TILE = 64  # of directions: 64 x 64 accumulators spill nowhere
TOKENS = 32  # of one step of the Gram loop
RUN_TOKENS, MOST_RUNS = 1024, 64
WIDEST = 256


@triton.jit
def _gram(
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
def _gathered(
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
def _factor(matrix, factor, inverse, diagonal, P: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
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
def _lengths(
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


def leverage_scores(
    directions: Tensor,
    weights: Tensor,
    ridge: Tensor,
    weight_eps: float = 0.0,
    loose: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Leverage:
    """Leverage of every token, in float32; as `kvtool.kernels.leverage.reference.leverage_scores`, on any device that
    Triton runs on.

    A head with a pivot that is not clearly positive, or with a score that float32's rounding may move by more than a
    near tie, is computed by the reference in float64 on the CPU.

    Args:
        dtype: of the reference's products; not read.
        The others as in the reference.

    Raises:
        LeverageError: naming the head, from the reference.
        Unsupported: for directions wider than 256.
    """
    heads, tokens = weights.shape
    width, shared = directions.shape[2], heads // directions.shape[0]
    if width > WIDEST:
        raise Unsupported(f"directions of {width} numbers, and the kernel holds {WIDEST}")
    if not tokens:
        empty = torch.zeros(heads, dtype=torch.float64, device=weights.device)
        return Leverage(torch.zeros(heads, 0, dtype=torch.float64, device=weights.device), empty, empty.clone())
    u = directions.to(_storage(directions.dtype)).contiguous()
    wide, ridge = weights.to(torch.float64), ridge.to(torch.float64)
    unit = torch.maximum(wide.amax(1) + weight_eps, ridge)  # [H], > 0 where A can be factored at all
    scaled = ((wide + weight_eps) / unit[:, None]).to(torch.float32).contiguous()
    aside = None if loose is None else (loose.to(torch.float64) / unit.sqrt()[:, None]).contiguous()
    lengths, refused = _run(u, scaled, (ridge / unit).contiguous(), aside, shared)
    scores = wide / unit[:, None] * lengths.to(torch.float64)
    jitter = torch.zeros(heads, dtype=torch.float64, device=weights.device)
    for head, why in enumerate(refused.tolist()):
        if not why:
            continue
        hand_over("leverage", REFUSED[why])
        found = _by_reference(directions, weights, ridge, weight_eps, loose, head, shared)
        scores[head], jitter[head] = found.scores[0].to(scores.device), found.jitter[0].to(scores.device)
    return Leverage(scores, scores.sum(1) / width, jitter)


REFUSED = {
    1: "the matrix of a head is not finite or not positive definite in float32",
    2: "the matrix of a head is too badly conditioned for float32",
}


def _run(u: Tensor, weights: Tensor, ridge: Tensor, loose: Tensor | None, shared: int) -> tuple[Tensor, Tensor]:
    """|L^-1 u_i|^2 [H, N] float32, and [H] why a head's are worth nothing: 0 for sound ones, else of `REFUSED`."""
    (heads, tokens), width = weights.shape, u.shape[2]
    padded = triton.cdiv(width, PANEL) * PANEL
    power = triton.next_power_of_2(padded)
    run = max(RUN_TOKENS, triton.cdiv(triton.cdiv(tokens, MOST_RUNS), TOKENS) * TOKENS)
    runs, tiles = triton.cdiv(tokens, run), triton.cdiv(padded, TILE)

    def room(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.float32, device=u.device)

    how = {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": True}
    partial, matrix = room(runs, heads, padded, padded), room(heads, padded, padded)
    _gram[(tiles * tiles, heads, runs)](
        u, weights, partial, tokens, run, shared, D=width, P=padded, B=TILE, T=TOKENS, **how
    )
    _gathered[(padded, heads)](
        partial, ridge, loose, matrix, runs, D=width, P=padded, B=power, LOOSE=loose is not None, **how
    )
    factor, inverse, pivots = room(heads, padded, padded), room(heads, padded, padded), room(heads, padded)
    _factor[(heads,)](matrix, factor, inverse, pivots, P=padded, R=power, C=PANEL, **{**how, **FACTOR_HOW})
    own = matrix.diagonal(dim1=1, dim2=2)
    doubt = (inverse.square() * own[:, None, :]).sum(-1)
    lengths, doubtful = room(heads, tokens), room(heads, tokens)
    _lengths[(triton.cdiv(tokens, TILE), heads)](
        u, inverse, doubt, lengths, doubtful, tokens, shared, D=width, P=padded, B=TILE, T=TILE, **how
    )
    positive = (pivots.square() >= LEAST_PIVOT * own) & torch.isfinite(pivots)  # False for NaN
    whole = positive.all(1) & torch.isfinite(lengths).all(1) & torch.isfinite(doubtful).all(1)
    magnified = torch.where(lengths > 0, doubtful / lengths, 0.0).amax(1)
    return lengths, torch.where(whole, torch.where(magnified <= MOST_MAGNIFIED, 0, 2), 1)


FACTOR_HOW = {"num_warps": 8, "num_stages": 1}  # nothing is fetched ahead of the barrier


def _storage(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype in (torch.bfloat16, torch.float16) else torch.float32


def _by_reference(
    directions: Tensor,
    weights: Tensor,
    ridge: Tensor,
    weight_eps: float,
    loose: Tensor | None,
    head: int,
    shared: int,
) -> Leverage:
    here = slice(head, head + 1)
    mine = directions[head // shared][None].cpu(), weights[here].cpu(), ridge[here].cpu()
    try:
        return reference.leverage_scores(*mine, weight_eps, None if loose is None else loose[here].cpu())
    except LeverageError as error:
        raise LeverageError(head, error.reason) from None
