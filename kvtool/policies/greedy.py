"""Greedy growth: the token of largest gain in a log-determinant, again and again, by rank-one updates."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from kvtool.policies.group import reduce_group
from kvtool.policies.parameters import Reducer

FAR = 1e4  # leverage up to which leverages are updated by differences
WORN = 5e-6  # a gain that has fallen to this share of the largest leverage at the last whitening calls for another
EQUAL = (
    64 * torch.finfo(torch.float64).eps
)  # gains this close, relative to the same leverage, are equal but for rounding
CANDIDATES = 256  # tokens that are followed pick by pick; the others wait


def grow(x: Tensor, held: Tensor, count: int, reducer: Reducer) -> Tensor:
    """[N] gains in nats of the `count` tokens picked, never increasing, below them what the others would still add;
    +inf for the held. Of equal gains the newest token wins.

    The gain of token i is 1/2 log(1 + l_i) with l_i = x_i^T P x_i, its leverage against the set so far, reduced
    over the group. A pick j takes (x_i^T P x_j)^2 / (1 + l_j) from every l_i, and P x_j x_j^T P / (1 + l_j) from P:
    O(g·N·r) a pick. Leverages only fall, so all but the most promising tokens wait, with what they had as a
    bound, and are brought up to date by one product for many picks.

    A difference of large numbers keeps no digits of a small one. Where a leverage is above FAR every pick whitens
    all tokens instead, x <- (I + x_j x_j^T)^(-1/2) x, and where gains have become small against what they
    were, all tokens are whitened by the picks since: l_i = |x_i|^2 is a sum of squares then.

    Args:
        x: [g, N, r] float64, directions times the root of weight over ridge, whitened by the held; overwritten.
        held: [N] bool.
    """
    scores = torch.full((x.shape[1],), torch.inf, dtype=torch.float64)
    taken, last = held.clone(), math.inf
    leverage = x.square().sum(2)  # [g, N]
    while count:
        largest = float(leverage[:, ~taken].max())
        if largest > FAR:
            gains = _gains(leverage, reducer).masked_fill_(taken, -torch.inf)
            pick = len(gains) - 1 - int(gains.flip(0).argmax())
            found = [(pick, float(gains[pick]))]
            _whiten_by_one(x, pick, leverage[:, pick])
        else:
            found = _update(x, leverage, taken, count, reducer, largest)
            if len(found) < count:
                _whiten(x, torch.tensor([pick for pick, _ in found]))
        count -= len(found)
        for pick, gain in found:
            last = min(last, gain)  # rounding must not let gains rise
            scores[pick], taken[pick] = last, True
        if largest > FAR or count:
            torch.sum(x.square(), 2, out=leverage)
    gains = _gains(leverage, reducer)
    scores[~taken] = gains[~taken].clamp_max(float(np.nextafter(last, -math.inf)))
    return scores


def _gains(leverage: Tensor, reducer: Reducer) -> Tensor:
    """[n] of `leverage` [g, n]."""
    return reduce_group(0.5 * leverage.log1p(), 1, reducer)[0]


def _update(
    x: Tensor, leverage: Tensor, taken: Tensor, count: int, reducer: Reducer, largest: float
) -> list[tuple[int, float]]:
    """Up to `count` picks with their gains, at least one, until gains are small against the `largest` leverage;
    `leverage` [g, N] follows.

    Args:
        x: whitened by everything taken before, and not changed here.
    """
    taken, inverse = taken.clone(), torch.eye(x.shape[2], dtype=x.dtype).repeat(len(x), 1, 1)  # P
    worn, equal = WORN * largest, EQUAL * largest
    found: list[tuple[int, float]] = []
    while len(found) < count and not (found and found[-1][1] <= worn):
        gains = _gains(leverage, reducer).masked_fill_(taken, -torch.inf)
        newest_first = gains.flip(0).argsort(descending=True, stable=True)
        order = len(gains) - 1 - newest_first[: int((~taken).sum())]
        near, rest = order[:CANDIDATES].sort(descending=True).values, order[CANDIDATES:]
        bar = float(gains[rest[0]]) if len(rest) else -math.inf
        most = min(count - len(found), len(near))
        picks = _among(x[:, near], inverse, leverage[:, near], bar, worn, equal, most, reducer)
        found += [(int(near[at]), gain) for at, gain in picks]
        chosen = near[[at for at, _ in picks]]
        taken[chosen] = True
        for own, own_inverse, own_leverage in zip(x, inverse, leverage, strict=True):
            towards = own[chosen] @ own_inverse  # [m, r], x_j^T P
            matrix = towards @ own[chosen].T
            matrix.diagonal().add_(1.0)
            towards = torch.linalg.solve_triangular(torch.linalg.cholesky(matrix), towards, upper=False)
            own_inverse.addmm_(towards.T, towards, alpha=-1)
            own_leverage.sub_((own @ towards.T).square_().sum(1)).clamp_min_(0)
    return found


def _among(
    here: Tensor,
    inverse: Tensor,
    leverage: Tensor,
    bar: float,
    worn: float,
    equal: float,
    count: int,
    reducer: Reducer,
) -> list[tuple[int, float]]:
    """Picks among the candidates `here` [g, n, r], newest first, with their gains: at least one, until one has no
    more than `bar`, which others may have, or at most `worn`. A Cholesky factorisation with pivoting, of
    which only the columns that are needed exist.

    Args:
        inverse: [g, r, r], P.
        leverage: [g, n], overwritten.
    """
    group, tokens, _ = here.shape
    products = here @ inverse @ here.transpose(1, 2)  # [g, n, n], x_i^T P x_j
    columns = here.new_empty(group, min(count, tokens), tokens)  # of the factor, a pick a row
    gone = torch.zeros(tokens, dtype=torch.bool)
    found: list[tuple[int, float]] = []
    for place in range(count):
        gains = _gains(leverage, reducer).masked_fill_(gone, -torch.inf)
        at = int((gains >= gains.max() - equal).to(torch.int8).argmax())  # the newest of equals
        gain = float(gains[at])
        if found and (gain <= bar or found[-1][1] <= worn):
            break
        found.append((at, gain))
        gone[at] = True
        for head in range(group):
            done, column = columns[head, :place], columns[head, place]
            torch.addmv(products[head, at], done.T, done[:, at], alpha=-1, out=column)
            column.div_((1 + leverage[head, at]).sqrt())
            leverage[head].addcmul_(column, column, value=-1).clamp_min_(0)
    return found


def _whiten_by_one(x: Tensor, pick: int, length: Tensor) -> None:
    """x <- (I + x_j x_j^T)^(-1/2) x with |x_j|^2 = `length` [g]."""
    own, length = x[:, pick].clone(), length[:, None]  # [g, r], [g, 1]
    shrink = ((1 + length).rsqrt() - 1) / length.clamp_min(torch.finfo(torch.float64).tiny)
    x.baddbmm_(x @ own[:, :, None], (shrink * own)[:, None, :])


def _whiten(x: Tensor, picks: Tensor) -> None:
    """x <- L^-1 x with L L^T = I + the sum of x_j x_j^T over `picks`; no leverage is above FAR."""
    for own in x:
        matrix = own[picks].T @ own[picks]
        matrix.diagonal().add_(1.0)
        own.copy_(torch.linalg.solve_triangular(torch.linalg.cholesky(matrix), own.T, upper=False).T)
