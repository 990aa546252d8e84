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

TILE_TOKENS = 4096
JITTERS = (0.0, 1e-22, 1e-20, 1e-18, 1e-16, 1e-14, 1e-12)  # relative to the mean of A's diagonal
SOUND = 1e-3  # smallest over largest diagonal of a Cholesky factor: its square is about 1 / condition
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
    gram = torch.zeros(directions.shape[1], directions.shape[1], dtype=torch.float64, device=directions.device)
    for u, w in zip(directions.split(TILE_TOKENS), weights.split(TILE_TOKENS), strict=True):
        wide = u.to(torch.float64)
        gram += wide.T @ (w.to(torch.float64)[:, None] * wide)
    return gram


def factor_of(directions: Tensor, weights: Tensor, ridge: float, loose: Tensor | None = None) -> tuple[Tensor, float]:
    """Lower triangle L with L L^T = ridge·I + sum_i w_i u_i u_i^T (+ loose loose^T), and the jitter it needed.

    The Cholesky factor where A is well conditioned. Elsewhere (weights that differ by ten orders of
    magnitude and more) the triangle of a QR factorisation of the weighted rows themselves, whose
    condition is only the root of A's. Where even that is hopeless, the ridge is raised by the jitter
    times the mean of A's diagonal, as little as helps.

    Args:
        directions, weights: [N, Dv], [N].

    Raises:
        ValueError: with a reason, where nothing helps.
    """
    matrix = weighted_gram(directions, weights)
    matrix.diagonal().add_(ridge)
    if loose is not None:
        matrix += loose[:, None] * loose
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


def _spread(triangle: Tensor) -> float:
    """Smallest over largest diagonal: how near to singular."""
    size = triangle.diagonal().abs()
    return float(size.min() / size.max())


def leverage_scores(
    directions: Tensor, weights: Tensor, ridge: Tensor, weight_eps: float = 0.0, loose: Tensor | None = None
) -> Leverage:
    """Leverage of every token, one matrix A per query head.

    Float64 throughout: the cost is 2·N·Dv^2 a head, small beside the attention that precedes it.

    Args:
        directions: [Hk, N, Dv], shared by the query heads of a group, or [H, N, Dv].
        weights: [H, N], >= 0.
        ridge: [H], > 0.
        weight_eps: added to the weights in A only.
        loose: [H, Dv], one more direction in A, its weight's root included, that belongs to no token.

    Raises:
        LeverageError: naming the head.
    """
    heads, tokens = weights.shape
    shared = heads // directions.shape[0]
    width = directions.shape[2]
    scores = torch.zeros(heads, tokens, dtype=torch.float64, device=weights.device)
    jitter = torch.zeros(heads, dtype=torch.float64, device=weights.device)
    for head in range(heads):
        u, w = directions[head // shared], weights[head].to(torch.float64)
        try:
            factor, jitter[head] = factor_of(
                u, w + weight_eps, float(ridge[head]), None if loose is None else loose[head]
            )
        except ValueError as error:
            raise LeverageError(head, str(error)) from None
        for start in range(0, tokens, TILE_TOKENS):
            part = slice(start, start + TILE_TOKENS)
            whitened = torch.linalg.solve_triangular(factor, u[part].to(torch.float64).T, upper=False)  # [Dv, n]
            scores[head, part] = w[part] * whitened.square().sum(0)
    return Leverage(scores, scores.sum(1) / width, jitter)
