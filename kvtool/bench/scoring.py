"""Scoring rows: leverage, greedy picks and exact search against the plain ways to the same answers."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from kvtool.bench.attention import agreeing
from kvtool.bench.goals import Measured
from kvtool.bench.situation import Situation
from kvtool.bench.splits import all_damages
from kvtool.errors import KvtoolError
from kvtool.kernels.leverage import leverage_scores
from kvtool.policies.capacity_pool import Pool
from kvtool.policies.selectors import greedy

HEADS, TOKENS, DIM = 4, 32768, 128
PICKS, CANDIDATES = 400, 4096
SUBSET_TOKENS, SUBSET_QUERIES, LOOPED = 20, 64, 2000


def solved_leverage(directions: Tensor, weights: Tensor, ridge: Tensor) -> Tensor:
    """[H, N] w u^T A^-1 u by one solve with all tokens as right-hand sides, head by head, in the dtype given.

    Args:
        directions: [Hk, N, D], shared by the heads of a group.
        weights: [H, N]; ridge: [H].
    """
    found, group = torch.empty_like(weights), len(weights) // len(directions)
    for head, w in enumerate(weights):
        u = directions[head // group]
        matrix = u.T @ (w[:, None] * u)
        matrix.diagonal().add_(ridge[head])
        found[head] = w * (u * torch.linalg.solve(matrix, u.T).T).sum(1)
    return found


def two_products(directions: Tensor, heads: int, small: Tensor) -> None:
    """The arithmetic that no way round can spare: [D, N] x [N, D] and [N, D] x [D, D], head by head."""
    for head in range(heads):
        u = directions[head * len(directions) // heads]
        torch.mm(u.T, u)
        torch.mm(u, small)


def leverage(here: Situation) -> dict[str, Measured]:
    """The heads of one group, which share their directions; in float32, and in float64, which policies ask for."""
    make = torch.Generator().manual_seed(0)
    u = torch.randn(1, TOKENS, DIM, generator=make)
    w = torch.rand(HEADS, TOKENS, generator=make).pow_(4)
    found: dict[str, Measured] = {}
    if here.wants("leverage_against_solving", "leverage_against_two_gemms"):
        found |= compared_leverage(here, u, w, 8.0)
    if here.wants("leverage_against_solving_float64", "leverage_against_two_gemms_float64"):
        wide = compared_leverage(here, u.double(), w.double(), 10.0)
        found |= {f"{name}_float64": one for name, one in wide.items()}
    return found


def compared_leverage(here: Situation, u: Tensor, w: Tensor, seconds: float) -> dict[str, Measured]:
    """Both leverage rows on directions [Hk, N, D] and weights [H, N], all sides in their dtype."""
    ridge = w.mean(1)
    small = torch.eye(u.shape[2], dtype=u.dtype)
    agreeing(leverage_scores(u, w, ridge, dtype=u.dtype).scores, solved_leverage(u, w, ridge), "leverage")
    rounds = here.watch.paired(
        {
            "solving": lambda: solved_leverage(u, w, ridge),
            "kvtool": lambda: leverage_scores(u, w, ridge, dtype=u.dtype),
            "two products": lambda: two_products(u, len(w), small),
        },
        seconds,
    )
    shape: dict[str, Any] = {
        "heads": len(w),
        "tokens": int(u.shape[1]),
        "dim": int(u.shape[2]),
        "dtype": str(u.dtype)[6:],
    }
    return {
        "leverage_against_solving": rounds.ratio("solving", "kvtool", **shape),
        "leverage_against_two_gemms": rounds.ratio("kvtool", "two products", **shape),
    }


def refactorised_picks(x: Tensor, picks: int) -> Tensor:
    """[picks] the greedy choice for logdet(I + sum of x x^T), with a fresh factor of the matrix at every pick.

    Args:
        x: [N, r] float64, directions times the root of weight over ridge.
    """
    matrix = torch.eye(x.shape[1], dtype=x.dtype)
    taken = torch.zeros(len(x), dtype=torch.bool)
    chosen = torch.empty(picks, dtype=torch.int64)
    columns = x.T.contiguous()
    for i in range(picks):
        factor = torch.linalg.cholesky(matrix)
        gains = torch.linalg.solve_triangular(factor, columns, upper=False).square().sum(0)
        pick = int(gains.masked_fill(taken, -math.inf).argmax())
        chosen[i], taken[pick] = pick, True
        matrix += x[pick][:, None] * x[pick]
    return chosen


def greedy_picks(pool: Pool, picks: int) -> Tensor:
    """[picks] kvtool's, in order: the gain falls from pick to pick."""
    scores, _ = greedy(pool, torch.zeros(pool.weights.shape[1], dtype=torch.bool), picks, "mean")
    return scores.argsort(descending=True, stable=True)[:picks]


def greedy_pool(tokens: int, dim: int) -> Pool:
    """One head's directions and weights, as a capacity policy has them."""
    make = torch.Generator().manual_seed(0)
    weights = torch.rand(1, tokens, generator=make, dtype=torch.float64).pow_(4)
    directions = torch.randn(1, tokens, dim, generator=make, dtype=torch.float64)
    return Pool(weights, directions, weights.mean(1))


def greedy_against(here: Situation) -> dict[str, Measured]:
    """All picks of both ways, which must be the same tokens in the same order."""
    found = compared_greedy(here, greedy_pool(CANDIDATES, DIM), PICKS, 25.0)
    if found.reason is not None:
        raise KvtoolError("internal", found.reason)
    return {"greedy_against_refactorising": found}


def compared_greedy(here: Situation, pool: Pool, picks: int, seconds: float) -> Measured:
    """The row on a pool of one head; without a number where the picks differ."""
    x = pool.directions[0] * (pool.weights[0] / pool.ridge[0]).sqrt()[:, None]
    other = (refactorised_picks(x, picks) != greedy_picks(pool, picks)).nonzero()[:, 0]
    if other.numel():
        return Measured.without(f"greedy picks another token than refactorising does, at pick {int(other[0])} first")
    rounds = here.watch.paired(
        {
            "refactorising": lambda: refactorised_picks(x, picks),
            "kvtool": lambda: greedy_picks(pool, picks),
        },
        seconds,
    )
    shape: dict[str, Any] = {"tokens": len(x), "dim": int(x.shape[1]), "picks": picks}
    return rounds.ratio("refactorising", "kvtool", **shape)


def looped_damages(logits: Tensor, values: Tensor, subsets: list[list[int]]) -> Tensor:
    """[K] damage of every subset of indices: sum over queries of |f_F - f_C|^2, one subset after another.

    Args:
        logits: [F, n] float64.
        values: [n, Dv] float64.
    """
    weights = torch.softmax(logits, 1)
    full = weights @ values
    found = torch.empty(len(subsets), dtype=torch.float64)
    for i, kept in enumerate(subsets):
        mine = weights[:, kept]
        found[i] = (full - mine @ values[kept] / mine.sum(1, keepdim=True)).square().sum()
    return found


def exhaustive(here: Situation) -> dict[str, Measured]:
    """All 2^20 subsets at once against one subset at a time."""
    make = torch.Generator().manual_seed(0)
    queries = torch.randn(SUBSET_QUERIES, DIM, generator=make, dtype=torch.float64)
    keys = torch.randn(SUBSET_TOKENS, DIM, generator=make, dtype=torch.float64)
    values = torch.randn(SUBSET_TOKENS, DIM, generator=make, dtype=torch.float64)
    logits = queries @ keys.T * DIM**-0.5
    count = 2**SUBSET_TOKENS
    numbers = torch.randint(1, count, (LOOPED,), generator=make)
    subsets = [[token for token in range(SUBSET_TOKENS) if number >> token & 1] for number in numbers.tolist()]
    every = all_damages(queries, keys, values, DIM**-0.5)
    agreeing(every[numbers], looped_damages(logits, values, subsets), "exhaustive search")
    rounds = here.watch.paired(
        {
            "loop": lambda: looped_damages(logits, values, subsets),
            "kvtool": lambda: all_damages(queries, keys, values, DIM**-0.5),
        },
        12.0,
    )
    shape: dict[str, Any] = {"tokens": SUBSET_TOKENS, "subsets": count, "queries": SUBSET_QUERIES, "looped": LOOPED}
    return {
        "exhaustive_seconds": rounds.alone("kvtool", **shape),
        "exhaustive_against_loop": rounds.ratio("loop", "kvtool", count / LOOPED, **shape),
    }
