"""Measured: what every metric says in A and in B, group by group, with interval and verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtool.compare.columns import Compared
from kvtool.compare.kinds import moved
from kvtool.compare.pairs import Ids, Numbers, finite
from kvtool.compare.statistics import Intervals, intervals
from kvtool.compare.tolerance import Tolerance, verdict
from kvtool.metrics import PredictedKL


@dataclass(frozen=True, eq=False)
class Values:
    """One column of both sides, aligned.

    Attributes:
        a, b: [n] numbers, NaN where null.
    """

    compared: Compared
    a: Numbers
    b: Numbers

    @property
    def predicts(self) -> bool:
        """Whether it is read from gradients."""
        return self.compared.metric == PredictedKL.name

    def without(self, entries: NDArray[np.bool_]) -> Values:
        """The same without these entries [n]: undefined on both sides."""
        return Values(self.compared, *(np.where(entries, np.nan, numbers) for numbers in (self.a, self.b)))

    @property
    def moved(self) -> NDArray[np.bool_]:
        """[n] where A and B do not hold the same."""
        return moved(self.a, self.b)


@dataclass(frozen=True, eq=False)
class Means:
    """One column over `count` groups of paired entries.

    Attributes:
        a, b: [count, S], the mean over what a group holds of each sequence; NaN where nothing of it is defined.
        paired: [count] entries of the group; undefined: those that are null in one side only; lost: in B only.
        same: [count] whether all are equal, nulls included.
    """

    a: Numbers
    b: Numbers
    paired: Ids
    undefined: Ids
    lost: Ids
    same: NDArray[np.bool_]

    @property
    def differences(self) -> Numbers:
        """[count, S] B - A."""
        return self.b - self.a


def means(values: Values, ids: Ids, sequence: Ids, count: int, sequences: Sequence[int]) -> Means:
    """Means per group and sequence.

    Args:
        ids: [n] group of every entry, negative for none.
        sequence: [n] its sequence, one of `sequences`.
    """
    inside = ids >= 0
    a, b, ids = values.a[inside], values.b[inside], ids[inside]
    place = np.searchsorted(np.asarray(sorted(sequences)), sequence[inside])
    code = ids * len(sequences) + place
    known = ~(np.isnan(a) | np.isnan(b))
    size = count * len(sequences)

    def summed(numbers: Numbers) -> Numbers:
        found: Numbers = np.bincount(code[known], weights=numbers[known], minlength=size).astype(np.float64)
        return found.reshape(count, -1)

    def counted(mask: NDArray[np.bool_]) -> Ids:
        return np.bincount(ids[mask], minlength=count)

    held = np.bincount(code[known], minlength=size).reshape(count, -1).astype(np.float64)
    held[held == 0] = np.nan
    apart = moved(a, b)
    return Means(
        a=summed(a) / held,
        b=summed(b) / held,
        paired=counted(np.ones_like(known)),
        undefined=counted(np.isnan(a) != np.isnan(b)),
        lost=counted(~np.isnan(a) & np.isnan(b)),
        same=counted(apart) == 0,
    )


def over_sequences(differences: Numbers) -> Intervals:
    """Intervals of the mean of every row of differences [m, S]; sequences without one (NaN) are left out of a row."""
    found = Intervals(*(np.full(len(differences), np.nan) for _ in range(4)))
    known = ~np.isnan(differences)
    counts = known.sum(axis=1)
    for count in np.unique(counts[counts > 1]).tolist():
        rows = np.flatnonzero(counts == count)
        mine = intervals(differences[rows][known[rows]].reshape(len(rows), count))
        for name in ("low", "high", "t_low", "t_high"):
            getattr(found, name)[rows] = getattr(mine, name)
    return found


def mean_of_known(numbers: Numbers) -> Numbers:
    """[m] the mean of each row [m, S], NaN left out; NaN where nothing is known."""
    known = ~np.isnan(numbers)
    held = known.sum(axis=1).astype(np.float64)
    held[held == 0] = np.nan
    found: Numbers = np.where(known, numbers, 0.0).sum(axis=1) / held
    return found


def compare(found: Means, metric: str, direction: str, tolerance: Tolerance) -> list[dict[str, Any]]:
    """One entry per group: `a`, `b`, `difference`, `ratio`, `low`, `high`, `t_low`, `t_high`, `sure`, `verdict`,
    `undefined`. Interval and `sure` are null with fewer than two sequences."""
    a, b, difference = mean_of_known(found.a), mean_of_known(found.b), mean_of_known(found.differences)
    spread = over_sequences(found.differences)
    allowed, sure = tolerance.allowed(metric, a), spread.sure
    entries = []
    for group in range(len(a)):
        if found.same[group]:
            judged = "same"
        elif np.isnan(difference[group]):
            judged = "undefined"
        else:
            judged = verdict(float(difference[group]), float(allowed[group]), direction)
            judged = "undefined" if judged == "within" and found.undefined[group] else judged
        has_interval = not np.isnan(spread.low[group])
        entries.append(
            {
                "a": finite(a[group]),
                "b": finite(b[group]),
                "difference": finite(difference[group]),
                "ratio": ratio(a[group], b[group]),
                **spread.ends(group),
                "sure": bool(sure[group]) if has_interval else None,
                "verdict": judged,
                "undefined": int(found.undefined[group]),
            }
        )
    return entries


def ratio(a: float, b: float) -> float | None:
    """B / A; null where A is 0 or either is undefined."""
    with np.errstate(over="ignore"):
        found = float("nan") if np.isnan(a) or np.isnan(b) or a == 0 else float(np.float64(b) / np.float64(a))
    return found if np.isfinite(found) else None
