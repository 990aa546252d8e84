"""Search: the best of all subsets of a sub-pool, exactly.

Every subset first gets a bound that is cheap and never wrong, then those that the bound cannot rule
out are evaluated by the definition, in float64. So the answer is that of a loop over all subsets.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from kvtool.errors import KvtoolError

LIMIT = 2_000_000  # subsets
TOKENS = 64  # in a sub-pool
EPS = float(np.finfo(np.float64).eps)

Evaluate = Callable[[Tensor, float], tuple[Tensor, Tensor]]


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Tiles that fit a core's own cache take microseconds: threads would wait for each other longer than they work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def check_search(tokens: int, keep: int) -> int:
    """How many subsets of `keep` out of `tokens` there are.

    Raises:
        KvtoolError: code `usage` where they are too many, naming the number, or there is none.
    """
    if not 1 <= keep <= tokens:
        raise KvtoolError("usage", f"cannot keep {keep} of a sub-pool of {tokens} tokens")
    count = math.comb(tokens, keep)
    if count > LIMIT:
        raise KvtoolError(
            "usage",
            f"exact search for {keep} of {tokens} tokens means {count:,} subsets, more than {LIMIT:,}",
            "a smaller sub-pool, or keep fewer of it",
        )
    if tokens > TOKENS:
        raise KvtoolError("usage", f"a sub-pool of {tokens} tokens is more than exact search takes ({TOKENS})")
    return count


@lru_cache(maxsize=32)
def subsets(tokens: int, keep: int) -> Tensor:
    """[S, b] uint8, every subset of `keep` indices, each newest first, in order: the lexicographically newest first."""
    count = check_search(tokens, keep)
    flat = itertools.chain.from_iterable(itertools.combinations(range(tokens - 1, -1, -1), keep))
    return torch.from_numpy(np.fromiter(flat, dtype=np.uint8, count=count * keep).reshape(count, keep))


@lru_cache(maxsize=16)
def binomials(tokens: int) -> Tensor:
    """[tokens + 1, tokens + 1] int64, C(i, j) clamped to LIMIT + 1, which no subset number reaches."""
    rows = [[min(math.comb(i, j), LIMIT + 1) for j in range(tokens + 1)] for i in range(tokens + 1)]
    return torch.tensor(rows)


def places_below(sets: Tensor, tokens: int) -> Tensor:
    """[...] how many subsets of the same size are older than each of `sets` [..., k], written newest first."""
    size = sets.shape[-1]
    return binomials(tokens)[sets.long(), torch.arange(size, 0, -1)].sum(-1)


def number_of(kept: Tensor, tokens: int) -> int:
    """Place of the set `kept` [b] of indices, in any order, within `subsets`."""
    newest_first = kept.sort(descending=True).values
    return math.comb(tokens, int(kept.numel())) - 1 - int(places_below(newest_first, tokens))


def members(sets: Tensor, tokens: int) -> Tensor:
    """[K, n] bool, which tokens each of `sets` [K, b] holds."""
    return torch.zeros(sets.shape[0], tokens, dtype=torch.bool).scatter_(1, sets.long(), True)


@dataclass(frozen=True)
class Best:
    """The best of all subsets; smaller is better here.

    Attributes:
        number: its place in `subsets`; of those that tie, the lexicographically newest.
        value: of that set.
        noise: what rounding can have done to `value`.
    """

    number: int
    value: float
    noise: float

    def settle(self, value: float, noise: float, what: str) -> float:
        """The value of another set, equal to the best where only rounding tells them apart.

        Raises:
            KvtoolError: code `internal` where the other set is better: the search was wrong.
        """
        if value + noise < self.value - self.noise:
            raise KvtoolError("internal", f"exact search in {what} was beaten: {value!r} below {self.value!r}")
        return self.value if value - noise <= self.value + self.noise else value


def smallest(bound: Tensor, evaluate: Evaluate, seeds: list[int]) -> Best:
    """The subset of smallest value, exactly, ties to the lexicographically newest.

    Args:
        bound: [S], at or below every subset's value; NaN says nothing.
        evaluate: (numbers [K] ascending, limit) -> values and noise, each [K], by the definition; it may give
            infinity for a set whose value less its noise is above the limit.
        seeds: a few sets that are good: the better, the fewer others are evaluated.
    """
    first = torch.tensor(sorted({*seeds, int(bound.nan_to_num(nan=-torch.inf).argmin())}))
    value, noise = evaluate(first, math.inf)
    limit = float((value + noise).min())
    opened = (~(bound > limit)).nonzero()[:, 0]
    value, noise = evaluate(opened, limit)
    if not bool(torch.isfinite(value).any()):
        raise KvtoolError("internal", "exact search ruled out every subset")
    top = int(value.argmin())
    tied = int((value - noise <= value[top] + noise[top]).nonzero()[0, 0])
    return Best(int(opened[tied]), float(value[tied]), float(noise[tied]))
