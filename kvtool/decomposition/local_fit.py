"""Local fit: how well the local linear picture of a kept subset meets the whole sub-pool's output."""

from __future__ import annotations

import torch
from torch import Tensor

from kvtool.decomposition.capacity import Centre
from kvtool.decomposition.damage import Damage
from kvtool.decomposition.search import EPS, members, subsets
from kvtool.decomposition.subpools import SubPool

BLOCK_SETS = 1 << 12
EVALUATED_NUMBERS = 1 << 17


class LocalFit:
    """sum over query heads and queries of |f_P(q) - f_C(mu) - J_C dq|^2.

    The local picture is sum over C of a_i (1 + z'_i - zbar) u_i, with a renormalised in C, z'_i the tangent
    logit of dq, zbar = sum of a_j z'_j.
    """

    def __init__(self, pool: SubPool, centre: Centre, damage: Damage) -> None:
        self.centre = centre
        self.values = pool.values
        away = pool.queries - pool.mean[:, None, :]  # [G, F, D]
        self.slope = pool.scale * centre.slopes[:, None, :] * (away @ pool.keys.T)  # z' [G, F, n]
        self.output = damage.output.view(pool.heads, -1, pool.values.shape[1])  # [G, F, Dv]
        self._lengths = torch.linalg.vector_norm(pool.values, dim=1)  # [n]

    def of(self, kept: Tensor, limit: float = torch.inf) -> tuple[Tensor, Tensor]:
        """The misfit of every set [K, b] and what rounding can have done to it, by the definition."""
        tokens, width = self.values.shape
        value, length = torch.zeros(2, kept.shape[0], dtype=torch.float64)
        at_once = max(1, EVALUATED_NUMBERS // ((width + 2 * tokens) * self.slope.shape[1]))
        for start in range(0, kept.shape[0], at_once):
            part = slice(start, start + at_once)
            a = self.centre.own_weights(members(kept[part], tokens))  # [G, K, n]
            for head in range(self.slope.shape[0]):
                slope, here = self.slope[head], a[head][:, None, :]  # [F, n], [K, 1, n]
                pull = here * (1 + slope - (here * slope).sum(-1, keepdim=True))  # [K, F, n]
                apart = self.output[head] - pull @ self.values  # [K, F, Dv]
                value[part] += apart.square().sum((1, 2))
                length[part] += (_largest(here, slope) @ self._lengths + self._norms(head)).square().sum(1)
        length = (2 * tokens + 64) * EPS * length.sqrt()
        return value, length * (2 * value.sqrt() + length) + 64 * EPS * value

    def _norms(self, head: int) -> Tensor:
        norms: Tensor = torch.linalg.vector_norm(self.output[head], dim=1)
        return norms

    def bounds(self, keep: int) -> Tensor:
        """[S], at or below the misfit of every subset.

        The square expands into moments of z' over the queries, which do not depend on the subset: a handful
        of products of the weights [S, n] with [n, n] matrices. What cancels in it is bounded by the
        triangle inequality over all its terms.
        """
        tokens = self.values.shape[0]
        gram = self.values @ self.values.T
        return torch.cat([self._bounds(part, gram) for part in subsets(tokens, keep).split(BLOCK_SETS)])

    def _bounds(self, sets: Tensor, gram: Tensor) -> Tensor:
        weights = self.centre.own_weights(members(sets, gram.shape[0]))
        found = torch.zeros(sets.shape[0], dtype=torch.float64)
        factor = (self.values.shape[1] + self.slope.shape[1] + 8 * gram.shape[0] + 64) * EPS
        for a, slope, output in zip(weights, self.slope, self.output, strict=True):
            sums, moments = slope.sum(0), slope.T @ slope  # [n], [n, n]
            meets = output @ self.values.T  # [F, n], f_P·u_i
            drawn = slope.T @ meets  # [n, n], of z'_k f_P·u_i
            spread = slope.shape[0] + sums[:, None] + sums[None] + moments
            with_gram, with_moments = a @ gram, a @ moments
            mean, square = a @ sums, (a * with_moments).sum(1)  # of zbar
            length = (a * with_gram).sum(1)
            line = a @ (meets.sum(0) + drawn.diagonal()) - ((a @ drawn) * a).sum(1)
            form = ((a @ (gram * spread)) * a).sum(1) - 2 * (a * with_moments * with_gram).sum(1)
            form += (square - 2 * mean) * length
            whole = output.square().sum()
            found += whole - 2 * line + form
            reach = slope.square().sum(0).sqrt()  # [n]
            most = slope.shape[0] ** 0.5 + reach + (a @ reach)[:, None]  # [S, n]
            found -= factor * 4 * (whole.sqrt() + ((a * most) @ self._lengths)).square()
        return found


def _largest(here: Tensor, slope: Tensor) -> Tensor:
    """[K, F, n], absolute terms of the local picture's weights."""
    size = slope.abs()
    return here * (1 + size + (here * size).sum(-1, keepdim=True))
