"""Damage: what keeping a subset does to the outputs of a sub-pool, for one subset and for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from kvtool.decomposition.search import EPS, binomials, check_search, members, places_below, subsets
from kvtool.decomposition.split_masks import TINY, add_damage
from kvtool.decomposition.subpools import SubPool

EVALUATED_NUMBERS = 1 << 16  # of outputs that are evaluated at once
CHUNK = 256  # query rows whose quadratic forms are made at once


def capped_logits(products: Tensor, softcap: float | None) -> Tensor:
    """Logits from scaled products."""
    return products if softcap is None else softcap * torch.tanh(products / softcap)


def shares(logits: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attention over the last dimension and the sink's share; the maximum subtracted is the set's own.

    Args:
        logits: [..., n], -inf for tokens outside the set.
        sink: [...] or None.
    """
    if sink is None:
        return torch.softmax(logits, -1), logits.new_zeros(logits.shape[:-1])
    both = torch.softmax(torch.cat([logits, sink.expand(logits.shape[:-1])[..., None]], -1), -1)
    return both[..., :-1], both[..., -1]


class Damage:
    """D(C) = sum over query heads and queries of |f_P - f_C|^2.

    Attributes:
        weights: [R, n] attention over the whole sub-pool, R = G·F query rows, head by head.
        sink: [R] the sink's share.
        output: [R, Dv] f_P.
        energy: sum of |f_P|^2.
    """

    def __init__(self, pool: SubPool) -> None:
        self.values = pool.values
        self.tokens = pool.tokens
        logits = capped_logits(pool.scale * (pool.queries @ pool.keys.T), pool.softcap)  # [G, F, n]
        self.logits = logits.reshape(-1, pool.tokens)
        rows = pool.queries.shape[1]
        self.sink_logits = None if pool.sink_logits is None else pool.sink_logits.repeat_interleave(rows)  # [R]
        self.weights, self.sink = shares(self.logits, self.sink_logits)
        self.output = self.weights @ self.values
        self.energy = float(self.output.square().sum())
        self._largest = float(torch.linalg.vector_norm(self.values, dim=1).max())

    def of(self, kept: Tensor, limit: float = torch.inf) -> tuple[Tensor, Tensor]:
        """Damage of every set [K, b] and what rounding can have done to it, by the definition.

        A query's error is written sum over evicted p_i (u_i - f_C): lost attention times its distance from
        what is kept. A set is given up, as infinity, once a part of the queries is already above `limit`.
        """
        inside = members(kept, self.tokens)  # [K, n]
        square, mass = inside.new_zeros(2, inside.shape[0], dtype=torch.float64)
        alive = torch.arange(inside.shape[0])
        step = self.logits.shape[0] if limit == torch.inf else max(16, self.logits.shape[0] // 8)
        for start in range(0, self.logits.shape[0], step):
            for sets, rows in self._tiles(alive, start, step):
                error, lost = self._errors(inside[sets], rows)
                square[sets] += error
                mass[sets] += lost
            value, noise = square[alive], self._noise(square[alive], mass[alive])
            alive = alive[value - noise <= limit]
        value = torch.full_like(square, torch.inf)
        value[alive] = square[alive]
        return value, self._noise(square, mass)

    def _tiles(self, sets: Tensor, start: int, step: int) -> Iterator[tuple[Tensor, slice]]:
        width = self.values.shape[1] + 2 * self.tokens
        stop = min(start + step, self.logits.shape[0])
        rows = max(1, min(stop - start, EVALUATED_NUMBERS // width))
        at_once = max(1, EVALUATED_NUMBERS // (width * rows))
        for first in range(start, stop, rows):
            for part in sets.split(at_once):
                yield part, slice(first, min(first + rows, stop))

    def _errors(self, inside: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """Sums over the query rows of |error|^2 and of lost mass^2, each [k]."""
        here = inside[:, None, :]  # [k, 1, n]
        sink = None if self.sink_logits is None else self.sink_logits[rows]
        kept, _ = shares(self.logits[rows].masked_fill(~here, -torch.inf), sink)  # [k, r, n]
        lost = self.weights[rows].masked_fill(here, 0.0)
        mass = lost.sum(-1, keepdim=True)
        error = (lost - mass * kept) @ self.values  # [k, r, Dv]
        return error.square().sum((1, 2)), mass.square().sum((1, 2))

    def _noise(self, square: Tensor, mass: Tensor) -> Tensor:
        length = (2 * self.tokens + 32) * EPS * self._largest * mass.sqrt()  # of the error over all queries
        return length * (2 * square.sqrt() + length) + 64 * EPS * square

    @cached_property
    def forms(self) -> tuple[Tensor, Tensor, float]:
        """Shares p [R, 1 + n], the sink first; Gram matrices [R, 1 + n, 1 + n] of p_i (f_P - u_i); the slack.

        f_P - f_C = [ sum over C of p_i (f_P - u_i) + p_sink f_P ] / (sum over C of p_i + p_sink): damage is a
        quadratic form in C's indicator over the square of a linear one.

        Rounding: the terms of the form add up in absolute value to at most (rho · denominator)^2, where rho is
        the largest length among f_P - u_i (and f_P where there is a sink). So each query is off by a few
        eps·rho^2 whatever the subset, and by the error of f_P itself: the slack.
        """
        p = torch.cat([self.sink[:, None], self.weights], 1)
        gram = p.new_empty(*p.shape, p.shape[1])
        slack = 0.0
        off = 2 * (self.tokens + 8) * EPS * self._largest  # of f_P
        for start in range(0, p.shape[0], CHUNK):
            rows = slice(start, start + CHUNK)
            f = self.output[rows, None]
            apart = torch.cat([f, f - self.values], 1)  # [r, 1 + n, Dv]
            moved = p[rows, :, None] * apart
            torch.bmm(moved, moved.transpose(1, 2), out=gram[rows])
            rho = torch.linalg.vector_norm(apart if self.sink_logits is not None else apart[:, 1:], dim=2).amax(1)
            few = (self.values.shape[1] + 4 * self.tokens + 2000) * EPS
            slack += float((few * rho.square() + off * (2 * rho + off)).sum())
        return p, gram, slack

    def bounds(self, keep: int, limit: float = torch.inf) -> Tensor:
        """[S], at or below the damage of every subset.

        Split the tokens into halves A and B: both forms are tables over the subsets of each half, plus one
        product of A's rows with B's columns, so a query costs about n/2 operations a subset.

        Args:
            limit: a subset of one half that does more damage than this to a part of the queries, whatever it is
                combined with, is not followed further: its bounds stay what they are then, above the limit.
        """
        p, gram, slack = self.forms
        split = 1 + self.tokens // 2
        found = torch.empty(check_search(self.tokens, keep), dtype=torch.float64)
        most, parts = (limit + slack) * (1 + 128 * EPS), max(1, p.shape[0] // CHUNK)
        for a, b, numbers in halves(self.tokens, keep):
            total = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float64)
            for part in range(parts):  # each with queries of all heads
                add_damage(total, a, b, gram[part::parts], p[part::parts], split)
                found[numbers.flatten()] = total.flatten()
                rows, columns = ~(total.amin(1) > most), ~(total.amin(0) > most)
                if not bool(rows.any()):
                    break
                if not bool(rows.all() and columns.all()):
                    a, b = a[rows], b[columns]
                    total, numbers = total[rows][:, columns], numbers[rows][:, columns]
        return found * (1 - 64 * EPS) - slack

    def addition_bounds(self, chosen: Tensor) -> Tensor:
        """[n], at or below the damage of keeping the indices `chosen` and one token more."""
        p, gram, slack = self.forms
        inside = torch.zeros(1 + self.tokens, dtype=torch.float64)
        inside[0] = 1.0
        inside[1 + chosen] = 1.0
        drawn = gram @ inside  # [R, 1 + n]
        form = (drawn @ inside)[:, None] + 2 * drawn + gram.diagonal(dim1=1, dim2=2)
        below = (p @ inside)[:, None] + p + TINY
        return (form / below.square()).sum(0)[1:] * (1 - 64 * EPS) - slack


@lru_cache(maxsize=4)
def halves(tokens: int, keep: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """For every split of `keep` between the older half of the tokens and the newer one: indicators of the
    older half's subsets [A, 1 + n/2], led by a 1; of the newer half's [B, n - n/2]; numbers [A, B] in `subsets`."""
    split = tokens // 2
    newer = tokens - split
    count = check_search(tokens, keep)
    found = []
    for older_kept in range(max(0, keep - newer), min(split, keep) + 1):
        a, b = _subsets_or_none(split, older_kept), _subsets_or_none(newer, keep - older_kept)
        indicator_a = torch.cat([torch.ones(a.shape[0], 1, dtype=torch.bool), members(a, split)], 1)
        # the newer half's members are counted first, as the larger places of the whole set
        places = torch.arange(keep, older_kept, -1)
        above = binomials(tokens)[b.long() + split, places].sum(-1)
        numbers = count - 1 - (places_below(a, tokens)[:, None] + above[None, :])
        found.append((indicator_a.double(), members(b, newer).double(), numbers))
    return found


def _subsets_or_none(tokens: int, keep: int) -> Tensor:
    return subsets(tokens, keep) if keep else torch.zeros(1, 0, dtype=torch.uint8)
