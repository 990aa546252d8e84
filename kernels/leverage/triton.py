"""Leverage in Triton: weighted Gram matrices, their Cholesky factors with inverse, and the scores, on one card.

Four launches for all heads, no atomics, so the same numbers every time:

1. `gram_kernel`: partial sums over runs of tokens of the lower tiles of sum_i w_i u_i u_i^T; dots in tf32x3;
2. `matrix_kernel`: the runs added up in float64, with ridge and loose direction, rounded to float32;
3. `factor_kernel`: one program a head, left-looking by panels of 16 columns: L and L^-1; dots in ieee float32;
4. `lengths_kernel`: |L^-1 u_i|^2 of every token; dots in tf32x3.

Storage float32, bfloat16 or float16; all sums in float32 or wider. Weights and ridge are divided by the largest of
them, so that no head leaves float32's range. What float32 cannot factor soundly is handed to the float64 reference,
head by head, and said to `kvtool.kernels.device`.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from kvtool.kernels.device import Unsupported, hand_over
from kvtool.kernels.leverage import reference
from kvtool.kernels.leverage.leverage_kernels import factor_kernel, gram_kernel, lengths_kernel, matrix_kernel
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
    gram_kernel[(tiles * tiles, heads, runs)](
        u, weights, partial, tokens, run, shared, D=width, P=padded, B=TILE, T=TOKENS, **how
    )
    matrix_kernel[(padded, heads)](
        partial, ridge, loose, matrix, runs, D=width, P=padded, B=power, LOOSE=loose is not None, **how
    )
    factor, inverse, pivots = room(heads, padded, padded), room(heads, padded, padded), room(heads, padded)
    factor_kernel[(heads,)](matrix, factor, inverse, pivots, P=padded, R=power, C=PANEL, **{**how, **FACTOR_HOW})
    own = matrix.diagonal(dim1=1, dim2=2)
    doubt = (inverse.square() * own[:, None, :]).sum(-1)
    lengths, doubtful = room(heads, tokens), room(heads, tokens)
    lengths_kernel[(triton.cdiv(tokens, TILE), heads)](
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
