"""Statistics of ages: of the tokens of many caches at once, in which rows that are kept stand in order."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvtool.metrics.survival import Rows

STATISTICS = ("min", "p10", "p50", "p90", "max", "mean")
SHARES = (0.1, 0.5, 0.9)


class Held:
    """The tokens that R caches hold at one step.

    Args:
        mask: [R, n] bool, which of the rows first..first+n-1, those before `step`, are held.
        first: the oldest row that the step sees.
    """

    def __init__(self, mask: Rows, first: int) -> None:
        self._width, self._first = mask.shape[1], first
        self._places = np.flatnonzero(mask)  # cache by cache, old rows first
        self._starts = np.arange(mask.shape[0], dtype=np.int64) * self._width
        self._offsets = np.searchsorted(self._places, [*self._starts.tolist(), mask.size])
        self.sizes = np.diff(self._offsets)  # [R]

    def before(self, row: int) -> Rows:
        """[R] tokens in rows before `row`."""
        inside = min(max(row - self._first, 0), self._width)
        found: Rows = np.searchsorted(self._places, self._starts + inside) - self._offsets[:-1]
        return found

    def statistics(self, prefix: str) -> list[dict[str, Any]]:
        """Per cache the columns `<prefix>_…`: how many tokens, their ages, and the ages by powers of two."""
        sums = np.concatenate([[0], np.cumsum(self._places)])[self._offsets]
        # An age is the width less the column of the row: exact, and so is the sum.
        total = self.sizes * (self._width + self._starts) - np.diff(sums)
        some = np.maximum(self.sizes, 1)
        values = [self._age(np.zeros_like(self.sizes)), *(self._quantile(share) for share in SHARES)]
        values += [self._age(some - 1), total / some]
        each = list(zip(*(value.tolist() for value in values), strict=True))
        histograms = self._histograms(values[STATISTICS.index("max")])
        found = []
        for cache, size in enumerate(self.sizes.tolist()):
            mine = each[cache] if size else [None] * len(STATISTICS)
            found.append(
                {
                    f"{prefix}_tokens": size,
                    **{f"{prefix}_age_{name}": value for name, value in zip(STATISTICS, mine, strict=True)},
                    f"{prefix}_age_histogram": histograms[cache] if size else [],
                }
            )
        return found

    def _age(self, index: Rows) -> Rows:
        """[R] int64, the age number `index` [R] from the youngest on; of an empty cache anything."""
        if not self._places.size:
            return np.zeros_like(index)
        at = np.clip(self._offsets[1:] - 1 - index, 0, self._places.size - 1)
        found: Rows = self._width - (self._places[at] - self._starts)
        return found

    def _quantile(self, share: float) -> Rows:
        """[R], linear interpolation between neighbours."""
        last = np.maximum(self.sizes - 1, 0)
        place = share * last
        low = np.minimum(place.astype(np.int64), last)
        below, above = self._age(low), self._age(np.minimum(low + 1, last))
        found: Rows = below.astype(np.float64) + (place - low) * (above - below).astype(np.float64)
        return found

    def _histograms(self, oldest: Rows) -> list[list[int]]:
        """Counts by powers of two up to the bin of the `oldest` [R] age."""
        bits = int(oldest.max(initial=0)).bit_length()
        younger = [self.sizes - self.before(self._first + self._width - (1 << bit) + 1) for bit in range(bits + 1)]
        counts = np.diff(np.stack(younger), axis=0).T.tolist()
        return [mine[: int(most).bit_length()] for mine, most in zip(counts, oldest.tolist(), strict=True)]


def by_powers(values: Rows) -> list[int]:
    """Counts of integers >= 1 by powers of two: bin b holds 2^b .. 2^(b+1) - 1; no empty bin at the end."""
    counts: list[int] = np.bincount(np.frexp(values.astype(np.float64))[1] - 1).tolist()  # x = m·2^e, 1/2 <= m < 1
    return counts


def lifetimes(evict: Rows, leaves: Rows) -> list[tuple[list[int], list[int]]]:
    """Per cache histograms of the number of queries that saw each token, ended by eviction and otherwise.

    Args:
        evict: [R, T] int32.
        leaves: [T] the first step whose query no longer sees each row by the layer's window.
    """
    caches, tokens = evict.shape
    bins = tokens.bit_length()  # no token is seen more often than there are queries
    by_bit = (np.frexp(np.arange(tokens + 1, dtype=np.float64))[1] - 1).astype(np.int32)
    lived = np.minimum(evict, leaves) - np.arange(tokens)
    otherwise = (evict >= leaves).astype(np.int32)
    at = by_bit[lived] + bins * (otherwise + 2 * np.arange(caches, dtype=np.int32)[:, None])
    counts = np.bincount(at.ravel(), minlength=2 * bins * caches).reshape(caches, 2, bins).tolist()
    return [(_trimmed(evicted), _trimmed(censored)) for evicted, censored in counts]


def _trimmed(counts: list[int]) -> list[int]:
    """Without empty bins at the end."""
    length = max((place + 1 for place, count in enumerate(counts) if count), default=0)
    return counts[:length]
