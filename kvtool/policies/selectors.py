"""Selectors: sets of tokens chosen together, as scores that a cut at the budget turns into that set."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from kvtool.errors import KvtoolError
from kvtool.kernels.leverage import factor_of
from kvtool.policies.capacity_pool import Pool
from kvtool.policies.greedy import grow
from kvtool.policies.group import reduce_group
from kvtool.policies.parameters import Reducer
from kvtool.stopwatch import stage

MOST_SUBSETS = 2_000_000
CHUNK_BYTES = 64 << 20


def two_pass(
    pool: Pool, scores: Tensor, protected: Tensor, budget: int, weight_eps: float, reducer: Reducer
) -> tuple[Tensor, Tensor]:
    """Keep the best 2·budget, score them once more among themselves. The weights stay those of the whole pool.

    Args:
        scores: [N], one-shot.
        protected: [N] bool, kept in the first pass whatever their score.

    Returns:
        [N], -inf for what the first pass dropped; and the jitter [g] of the second.

    Raises:
        LeverageError: where the second matrix cannot be factored.
    """
    count = len(scores)
    if 2 * budget >= count:
        return scores, torch.zeros(len(pool.weights), dtype=torch.float64)
    newest_first = torch.arange(count - 1, -1, -1)
    order = newest_first[scores[newest_first].argsort(descending=True, stable=True)]
    order = order[protected[order].to(torch.int8).argsort(descending=True, stable=True)]
    inside = order[: 2 * budget].sort().values
    again = pool.only(inside).leverage(weight_eps)
    refined = torch.full_like(scores, -torch.inf)
    refined[inside] = reduce_group(again.scores, 1, reducer)[0].to(scores.dtype)
    return refined, again.jitter


def greedy(pool: Pool, protected: Tensor, budget: int, reducer: Reducer) -> tuple[Tensor, Tensor]:
    """Grow the set token by token, each time by the largest gain of 1/2 logdet(I + sum of w u u^T / ridge).

    Protected tokens are in the set from the beginning: one factorisation for them, rank-one updates after that.
    Of equal gains the newest token wins.

    Returns:
        [N] gains in nats when picked, never increasing, below them what the others would still add;
        +inf for the protected. And the jitter [g] of the factorisation.

    Raises:
        ValueError: where the protected tokens' matrix cannot be factored.
    """
    x, jitter = _against(pool, protected)  # [g, N, r]
    return grow(x, protected, budget - int(protected.sum()), reducer), jitter


def exhaustive(pool: Pool, protected: Tensor, budget: int) -> tuple[Tensor, Tensor]:
    """The set of `budget` tokens, the protected included, of the largest capacity summed over the group.

    Returns:
        [N], 1 for the set and 0 for the others; and the jitter [g].

    Raises:
        KvtoolError: code `usage` above MOST_SUBSETS subsets.
        ValueError: where the protected tokens' matrix cannot be factored.
    """
    free = (~protected).nonzero()[:, 0].flip(0)  # newest first: of equal sets the newest comes first
    size = budget - int(protected.sum())
    subsets = math.comb(len(free), size)
    if subsets > MOST_SUBSETS:
        raise KvtoolError(
            "usage",
            f"selector=exhaustive would try {subsets:,} sets of {size} of {len(free)} tokens; "
            f"it stops at {MOST_SUBSETS:,}",
            "keep or protect more, use a shorter sequence, or choose selector=greedy",
        )
    x, jitter = _against(pool, protected)
    grams = x[:, free] @ x[:, free].transpose(1, 2)  # [g, n, n]
    best, chosen = -math.inf, free[:0]
    for sets in _subsets(len(free), size, max(1, CHUNK_BYTES // (8 * max(1, size) ** 2))):
        capacity = torch.zeros(len(sets), dtype=torch.float64)
        for gram in grams:
            capacity += 0.5 * _logdet(gram[sets[:, :, None], sets[:, None, :]])
        top = int(capacity.argmax())
        if float(capacity[top]) > best:
            best, chosen = float(capacity[top]), free[sets[top]]
    scores = protected.to(torch.float64)
    scores[chosen] = 1.0
    return scores, jitter


def _against(pool: Pool, held: Tensor) -> tuple[Tensor, Tensor]:
    """Directions times the root of weight over ridge, [g, N, r] float64, whitened by I + the sum over the `held`
    tokens, and the jitter [g] that took."""
    x = pool.absorbed() * (pool.weights / pool.ridge[:, None]).sqrt()[..., None]
    jitter = torch.zeros(len(x), dtype=torch.float64)
    if bool(held.any()):
        for index, own in enumerate(x):
            members = own[held]
            with stage("factorisation"):
                factor, jitter[index] = factor_of(members, torch.ones(len(members), dtype=torch.float64), 1.0)
            x[index] = torch.linalg.solve_triangular(factor, own.T, upper=False).T
    return x, jitter


def _logdet(gram: Tensor) -> Tensor:
    """[c], logdet(I + gram) of `gram` [c, b, b]."""
    matrix = gram + torch.eye(gram.shape[1], dtype=torch.float64)
    factor, failed = torch.linalg.cholesky_ex(matrix)
    found: Tensor = 2 * factor.diagonal(dim1=1, dim2=2).log().sum(1)
    if bool(failed.any()):
        found[failed > 0] = torch.linalg.slogdet(matrix[failed > 0]).logabsdet
    return found


def _subsets(count: int, size: int, chunk: int) -> Iterator[Tensor]:
    """Chunks [c, size] of all subsets of range(count), in lexicographic order."""
    every = itertools.combinations(range(count), size)
    while True:
        some = list(itertools.islice(every, chunk))
        if not some:
            return
        yield torch.from_numpy(np.array(some, dtype=np.int64).reshape(len(some), size))
