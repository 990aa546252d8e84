"""Selectors: ways to choose a subset without trying all of them, for any value that is to be small."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvtool.policies.objective import Objective

TIE = 1e-12  # of the largest: what is closer is equal, and the newer token wins

Score = Callable[[Tensor], Tensor]
Value = Callable[[Tensor], Tensor]
Bound = Callable[[Tensor], Tensor]


def newest_best(scores: Tensor) -> int:
    """Index of the largest of `scores` [n], -inf for tokens out of the question; the newest of those that tie."""
    top = float(scores.max())
    return int((scores >= top - TIE * abs(top)).nonzero()[-1, 0])


def largest(scores: Tensor, count: int) -> Tensor:
    """[count] indices of the largest of `scores` [n], ties to the newest."""
    left, chosen = scores.clone(), []
    for _ in range(count):
        chosen.append(newest_best(left))
        left[chosen[-1]] = -torch.inf
    return torch.tensor(chosen, dtype=torch.int64)


def one_shot(score: Score, tokens: int, keep: int) -> Tensor:
    """[b] indices of the best scores within the whole sub-pool.

    Args:
        score: indices [k] -> [k], how much each token matters within that set; higher is kept.
    """
    return largest(score(torch.arange(tokens)), keep)


def two_pass(score: Score, tokens: int, keep: int) -> Tensor:
    """[b] indices: keep twice as many as wanted, score those again within themselves, keep the best."""
    if 2 * keep >= tokens:
        return one_shot(score, tokens, keep)  # nothing has gone, so the scores stay what they are
    first = one_shot(score, tokens, 2 * keep).sort().values
    return first[largest(score(first), keep)]


def greedy(value: Value, tokens: int, keep: int, bound: Bound | None = None) -> Tensor:
    """[b] indices, in the order taken: each the one that leaves the smallest value with those before it.

    Args:
        value: sets [K, k] -> [K], to be small.
        bound: the tokens so far -> [n], at or below the value with each token added; spares evaluations.
    """
    chosen: list[int] = []
    for _ in range(keep):
        left = torch.tensor([token for token in range(tokens) if token not in chosen])
        sets = torch.cat([torch.tensor(chosen, dtype=torch.int64).expand(len(left), -1), left[:, None]], 1)
        open_ = torch.ones(len(left), dtype=torch.bool)
        if bound is not None:
            low = bound(torch.tensor(chosen, dtype=torch.int64))[left]
            seen = float(value(sets[int(low.argmin())][None]))
            open_ = ~(low > seen + TIE * abs(seen))
        found = torch.full((len(left),), torch.inf, dtype=torch.float64)
        found[open_] = value(sets[open_])
        chosen.append(int(left[newest_best(-found)]))
    return torch.tensor(chosen, dtype=torch.int64)


def leverage(objective: Objective) -> Score:
    """Score of a token within a set: w u^T A^-1 u, A = ridge·I + sum over the set of w u u^T, mean over query heads."""

    def score(inside: Tensor) -> Tensor:
        rows = (objective.weights[:, inside] / objective.ridge[:, None]).sqrt()[..., None]
        rows = rows * objective.directions[:, inside]  # [G, k, Dv]
        left, sizes, _ = torch.linalg.svd(rows, full_matrices=False)
        share = sizes.square() / (1 + sizes.square())
        scores: Tensor = (left.square() * share[:, None, :]).sum(2).mean(0)
        return scores

    return score
