"""Leverage in plain torch: weighted Gram matrix, Cholesky factor, scores.

`score_i = w_i u_i^T A^-1 u_i` with `A = ridge·I + sum_j (w_j + weight_eps) u_j u_j^T`: what token i
adds to the directions that the others already span (ridge leverage scores, Alaoui & Mahoney,
1411.0306). With a positive ridge A is positive definite however few tokens there are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

TILE_TOKENS = 1024  # of directions in the arithmetic's own dtype at a time, for all heads that share them
SPLIT = 64  # directions at least this wide are halved: symmetry and the triangle's zeros spare a quarter of the work
JITTERS = (0.0, 1e-22, 1e-20, 1e-18, 1e-16, 1e-14, 1e-12)  # relative to the mean of A's diagonal
SOUND = 1e-3  # smallest over largest diagonal of a Cholesky factor: its square is about 1 / condition
SOUND_NARROW = 0.03  # the same where the matrix was summed in float32, which has half the digits
SOUND_TRIANGLE = 1e-12  # likewise of a QR triangle, where nothing was squared


class LeverageError(ValueError):
    """A has no Cholesky factor: a weight or direction is not finite, or negative weights won.

    Attributes:
        head: the query head.
        reason: what is wrong with its matrix.
    """

    def __init__(self, head: int, reason: str) -> None:
        super().__init__(f"the leverage matrix of query head {head} {reason}")
        self.head, self.reason = head, reason


@dataclass(frozen=True, eq=False)
class Leverage:
    """Scores of one layer.

    Attributes:
        scores: [H, N] float64, >= 0; each below 1.
        rho: [H] float64, (1/Dv) sum of the scores, in [0, 1). Near 0 the ridge rules and the
            score is w_i |u_i|^2 / ridge: redundancy plays no part.
        jitter: [H] float64, what had to be added to the diagonal of A over its mean; 0 where A was sound.
    """

    scores: Tensor
    rho: Tensor
    jitter: Tensor


def weighted_gram(directions: Tensor, weights: Tensor) -> Tensor:
    """sum_i w_i u_i u_i^T in float64, tile by tile: `directions` [N, Dv], `weights` [N] -> [Dv, Dv]."""
    return weighted_grams(directions, weights[None], torch.float64)[0]


def weighted_grams(directions: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """One weighted Gram matrix a row of `weights`: `directions` [N, Dv], `weights` [g, N] -> [g, Dv, Dv] float64.

    A tile of directions is widened once and multiplied with its weighted copies for all heads in one product;
    only the lower triangle of blocks is computed.

    Args:
        dtype: of the products; tiles are added up in float64.
    """
    heads, (tokens, width) = weights.shape[0], directions.shape
    grams = torch.zeros(heads, width, width, dtype=torch.float64, device=directions.device)
    blocks = _blocks(width)
    # memory that is fresh for every tile would cost a third of the time
    weighted = directions.new_empty(
        min(tokens, TILE_TOKENS) * heads * max(high - low for low, high in blocks), dtype=dtype
    )
    products = [directions.new_empty(width - low, heads * (high - low), dtype=dtype) for low, high in blocks]
    for part in _tiles(tokens):
        wide, factor = directions[part].to(dtype), weights[:, part].to(dtype).T.contiguous()  # [n, Dv], [n, g]
        for (low, high), product in zip(blocks, products, strict=True):
            room = weighted[: factor.numel() * (high - low)].view(len(wide), heads, high - low)
            torch.mul(wide[:, None, low:high], factor[:, :, None], out=room)
            torch.mm(wide[:, low:].T, room.flatten(1), out=product)
            grams[:, low:, low:high] += product.view(width - low, heads, high - low).transpose(0, 1)
    upper = grams.tril(-1).transpose(1, 2)
    return grams.tril_().add_(upper)


def _blocks(width: int) -> list[tuple[int, int]]:
    return [(0, width // 2), (width // 2, width)] if width >= SPLIT else [(0, width)]


def factor_of(
    directions: Tensor, weights: Tensor, ridge: float, loose: Tensor | None = None, gram: Tensor | None = None
) -> tuple[Tensor, float]:
    """Lower triangle L with L L^T = ridge·I + sum_i w_i u_i u_i^T (+ loose loose^T), and the jitter it needed.

    The Cholesky factor where A is well conditioned. Elsewhere (weights that differ by ten orders of
    magnitude and more) the triangle of a QR factorisation of the weighted rows themselves, whose
    condition is only the root of A's. Where even that is hopeless, the ridge is raised by the jitter
    times the mean of A's diagonal, as little as helps.

    Args:
        directions, weights: [N, Dv], [N].
        gram: [Dv, Dv] float64 of these, where it is known.

    Raises:
        ValueError: with a reason, where nothing helps.
    """
    matrix = _matrix(weighted_gram(directions, weights) if gram is None else gram, ridge, loose)
    if not bool(torch.isfinite(matrix).all()):
        raise ValueError("is not finite")
    factor, failed = torch.linalg.cholesky_ex(matrix)
    if not bool(failed) and _spread(factor) >= SOUND:
        return factor, 0.0
    rows = weights.to(torch.float64).sqrt()[:, None] * directions.to(torch.float64)
    rows = rows if loose is None else torch.cat([rows, loose[None]])
    rows = rows[rows.square().sum(1).argsort(descending=True)]  # large rows first: small ones keep their digits
    size, unit = float(matrix.diagonal().mean()), torch.eye(len(matrix), dtype=torch.float64, device=matrix.device)
    for jitter in JITTERS if bool(torch.isfinite(rows).all()) else ():
        triangle = torch.linalg.qr(torch.cat([rows, math.sqrt(ridge + jitter * size) * unit]), mode="r").R
        if bool(torch.isfinite(triangle).all()) and _spread(triangle) >= SOUND_TRIANGLE:
            return triangle.T * triangle.diagonal().sign(), jitter
    raise ValueError("is not positive definite")


def _matrix(gram: Tensor, ridge: float, loose: Tensor | None) -> Tensor:
    """A of a Gram matrix."""
    matrix = gram.clone()
    matrix.diagonal().add_(ridge)
    return matrix if loose is None else matrix + loose[:, None] * loose


def _spread(triangle: Tensor) -> float:
    """Smallest over largest diagonal: how near to singular."""
    size = triangle.diagonal().abs()
    return float(size.min() / size.max())


def leverage_scores(
    directions: Tensor,
    weights: Tensor,
    ridge: Tensor,
    weight_eps: float = 0.0,
    loose: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Leverage:
    """Leverage of every token, one matrix A per query head.

    About 3·N·Dv^2 operations a head, two products with small matrices: the Gram matrix, and the directions with
    the inverse of A's factor. That inverse is taken only where the factor is well conditioned; elsewhere
    the triangle is solved for every token.

    Args:
        directions: [Hk, N, Dv], shared by the query heads of a group, or [H, N, Dv].
        weights: [H, N], >= 0.
        ridge: [H], > 0.
        weight_eps: added to the weights in A only.
        loose: [H, Dv], one more direction in A, its weight's root included, that belongs to no token.
        dtype: of the two products. float32 halves the time and keeps six digits; heads for which it would not do
            (a condition above about 1000, overflow) are computed in float64 all the same.

    Raises:
        LeverageError: naming the head.
    """
    heads, tokens = weights.shape
    shared = heads // directions.shape[0]
    width = directions.shape[2]
    scores = torch.zeros(heads, tokens, dtype=torch.float64, device=weights.device)
    jitter = torch.zeros(heads, dtype=torch.float64, device=weights.device)
    for first in range(0, heads, shared):
        u, w = directions[first // shared], weights[first : first + shared].to(torch.float64)
        own = range(first, first + shared)
        loosen = [None if loose is None else loose[head].to(torch.float64) for head in own]
        grams = weighted_grams(u, w + weight_eps, dtype)
        inverses: dict[torch.dtype, dict[int, Tensor]] = {dtype: {}, torch.float64: {}}
        for at, head in enumerate(own):
            narrow = dtype != torch.float64 and _holds(_matrix(grams[at], float(ridge[head]), loosen[at]))
            gram = grams[at] if narrow or dtype == torch.float64 else None
            try:
                factor, jitter[head] = factor_of(u, w[at] + weight_eps, float(ridge[head]), loosen[at], gram)
            except ValueError as error:
                raise LeverageError(head, str(error)) from None
            if _spread(factor) < SOUND:
                for part in _tiles(tokens):
                    whitened = torch.linalg.solve_triangular(factor, u[part].to(torch.float64).T, upper=False)
                    scores[head, part] = whitened.square().sum(0)
            else:
                unit = torch.eye(width, dtype=torch.float64, device=factor.device)
                inverse = torch.linalg.solve_triangular(factor, unit, upper=False)
                inverses[dtype if narrow else torch.float64][head] = inverse
        for kind, found in inverses.items():
            if found:
                scores[list(found)] = _lengths(u, torch.stack(list(found.values())).to(kind))
    scores *= weights
    return Leverage(scores, scores.sum(1) / width, jitter)


def _holds(matrix: Tensor) -> bool:
    """Whether float32 sums are good enough for this A."""
    if not bool(torch.isfinite(matrix).all()):
        return False
    factor, failed = torch.linalg.cholesky_ex(matrix)
    return not bool(failed) and _spread(factor) >= SOUND_NARROW


def _lengths(directions: Tensor, inverses: Tensor) -> Tensor:
    """[h, N] float64, |L^-1 u|^2 of `directions` [N, Dv] under every lower triangle of `inverses` [h, Dv, Dv]."""
    heads, width, _ = inverses.shape
    tokens = directions.shape[0]
    found = torch.empty(heads, tokens, dtype=torch.float64, device=directions.device)
    blocks = _blocks(width)
    stacked = [inverses[:, low:high, :high].reshape(-1, high).T.contiguous() for low, high in blocks]  # [b', h·b]
    room = inverses.new_empty(min(tokens, TILE_TOKENS) * max(matrix.shape[1] for matrix in stacked))
    for part in _tiles(tokens):
        wide = directions[part].to(inverses.dtype)
        lengths = found[:, part].zero_()
        for matrix in stacked:
            whitened = room[: len(wide) * matrix.shape[1]].view(len(wide), -1)
            torch.mm(wide[:, : matrix.shape[0]], matrix, out=whitened)
            lengths += whitened.square_().view(len(wide), heads, -1).sum(2).T
    return found


def _tiles(tokens: int) -> list[slice]:
    return [slice(start, min(start + TILE_TOKENS, tokens)) for start in range(0, tokens, TILE_TOKENS)]
