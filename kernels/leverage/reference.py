"""Leverage in plain torch: weighted Gram matrix, Cholesky factor, scores.

`score_i = w_i u_i^T A^-1 u_i` with `A = ridge·I + sum_j (w_j + weight_eps) u_j u_j^T`: what token i
adds to the directions that the others already span (ridge leverage scores, Alaoui & Mahoney,
1411.0306). With a positive ridge A is positive definite however few tokens there are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TILE_TOKENS = 4096
JITTERS = (0.0, 1e-15, 1e-14, 1e-13, 1e-12, 1e-11, 1e-10)  # relative to the mean of A's diagonal


class LeverageError(ValueError):
    """A has no Cholesky factor: a weight or direction is not finite, or negative weights won.

    Attributes:
        head: the query head.
    """

    def __init__(self, head: int, reason: str) -> None:
        super().__init__(f"the leverage matrix of query head {head} {reason}")
        self.head = head


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


def positive_factor(matrix: Tensor) -> tuple[Tensor, float]:
    """The lower Cholesky factor of `matrix` [n, n], and the relative jitter that its diagonal needed.

    A is positive definite on paper; in floating point weights that differ by sixteen orders of
    magnitude make it not.

    Raises:
        ValueError: with a reason, where no jitter helps.
    """
    if not bool(torch.isfinite(matrix).all()):
        raise ValueError("is not finite")
    size, unit = float(matrix.diagonal().mean().abs()), torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
    for jitter in JITTERS:
        factor, failed = torch.linalg.cholesky_ex(matrix if jitter == 0 else matrix + jitter * size * unit)
        if not bool(failed):
            return factor, jitter
    raise ValueError("is not positive definite")


def leverage_scores(
    directions: Tensor, weights: Tensor, ridge: Tensor, weight_eps: float = 0.0, extra: Tensor | None = None
) -> Leverage:
    """Leverage of every token, one matrix A per query head.

    Float64 throughout: the cost is 2·N·Dv^2 a head, small beside the attention that precedes it.

    Args:
        directions: [Hk, N, Dv], shared by the query heads of a group, or [H, N, Dv].
        weights: [H, N], >= 0.
        ridge: [H], > 0.
        weight_eps: added to the weights in A only.
        extra: [H, Dv, Dv], a positive semi-definite part of A that belongs to no token.

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
        matrix = weighted_gram(u, w + weight_eps)
        matrix.diagonal().add_(ridge[head].to(torch.float64))
        if extra is not None:
            matrix += extra[head]
        try:
            factor, jitter[head] = positive_factor(matrix)
        except ValueError as error:
            raise LeverageError(head, str(error)) from None
        for start in range(0, tokens, TILE_TOKENS):
            part = slice(start, start + TILE_TOKENS)
            whitened = torch.linalg.solve_triangular(factor, u[part].to(torch.float64).T, upper=False)  # [Dv, n]
            scores[head, part] = w[part] * whitened.square().sum(0)
    return Leverage(scores, scores.sum(1) / width, jitter)
