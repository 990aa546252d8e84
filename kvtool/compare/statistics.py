"""Statistics: intervals and tests over sequences, the independent unit of every comparison.

Intervals over few sequences are too narrow, and nothing can be done about it afterwards; so how often they hold the
truth is measured (tests/compare/coverage_study.py) and said. Of 100 intervals that promise 95 %, so many held it, over
paired differences that are normal, log-normal, or drawn from real differences between two policies' heads:

    sequences                    2    3    4    6    8   16   32
    bootstrap     normal        50   75   81   87   89   93   94
                  log-normal    44   64   68   74   77   84   88
                  policies      48   72   75   82   85   90   93
    Student's t   normal        95   95   95   95   95   95   95
                  log-normal    89   84   83   82   82   86   88
                  policies      96   97   97   96   96   95   95

The bootstrap cannot reach beyond the data: with two sequences its interval lies between their two differences.
Student's t reaches further and covers better below 16 sequences, at the price of long intervals; no method is right
about skewed differences. So both are told, and a difference is called sure only where both exclude 0. The percentile
interval stands instead of BCa, which covers no better here and is undefined for some draws.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from kvtool.metrics.student_t import two_sided

Numbers = NDArray[np.float64]

LEVEL, RESAMPLES, SEED = 0.95, 9999, 0
METHOD = "bootstrap over sequences, percentile"
LAWS = ("normal", "log-normal", "policies")
# Sequences -> share of intervals that held the truth under each of these laws: the bootstrap's, Student's.
COVERAGE: dict[int, tuple[tuple[float, float, float], tuple[float, float, float]]] = {
    2: ((0.50, 0.44, 0.48), (0.95, 0.89, 0.96)),
    3: ((0.75, 0.64, 0.72), (0.95, 0.84, 0.97)),
    4: ((0.81, 0.68, 0.75), (0.95, 0.83, 0.97)),
    6: ((0.87, 0.74, 0.82), (0.95, 0.82, 0.96)),
    8: ((0.89, 0.77, 0.85), (0.95, 0.82, 0.96)),
    16: ((0.93, 0.84, 0.90), (0.95, 0.86, 0.95)),
    32: ((0.94, 0.88, 0.93), (0.95, 0.88, 0.95)),
}
AT_ONCE = 2**22  # numbers of one block of resamples


@dataclass(frozen=True, eq=False)
class Intervals:
    """95 % intervals of means, each [m], in the units of the differences; NaN where there are fewer than two.

    Attributes:
        low, high: percentile bootstrap; t_low, t_high: Student's t.
    """

    low: Numbers
    high: Numbers
    t_low: Numbers
    t_high: Numbers

    def ends(self, row: int) -> dict[str, float | None]:
        """Those of one row as JSON says them: null where there is none."""
        found = {name: float(getattr(self, name)[row]) for name in ("low", "high", "t_low", "t_high")}
        return {name: None if np.isnan(value) else value for name, value in found.items()}

    @property
    def sure(self) -> NDArray[np.bool_]:
        """[m] both intervals exclude 0."""
        above = (self.low > 0) & (self.t_low > 0)
        below = (self.high < 0) & (self.t_high < 0)
        return above | below


def intervals(differences: Numbers) -> Intervals:
    """Intervals of the mean of paired differences.

    The same seeded resamples of sequences serve every row, so the order of rows decides nothing.

    Args:
        differences: [m, n], one row per thing that was measured in the same n sequences; no NaN.
    """
    rows, count = differences.shape
    if count < 2 or not rows:
        nothing = np.full(rows, np.nan)
        return Intervals(nothing, nothing, nothing, nothing)
    middle = differences.mean(axis=1)
    half = two_sided(count - 1, LEVEL) * differences.std(axis=1, ddof=1) / np.sqrt(count)
    low, high = middle.copy(), middle.copy()
    even = (differences == differences[:, :1]).all(axis=1)  # nothing to resample: the interval is the value itself
    low[even] = high[even] = differences[even, 0]
    half[even], middle[even] = 0.0, differences[even, 0]
    uneven = np.flatnonzero(~even)
    block = max(1, AT_ONCE // (RESAMPLES * count))
    for start in range(0, len(uneven), block):
        mine = uneven[start : start + block]
        found = stats.bootstrap(
            (differences[mine],),
            np.mean,
            axis=-1,
            n_resamples=RESAMPLES,
            confidence_level=LEVEL,
            method="percentile",
            rng=np.random.default_rng(SEED),
        ).confidence_interval
        low[mine], high[mine] = found.low, found.high
    return Intervals(low, high, middle - half, middle + half)


def paired_p(differences: Numbers) -> Numbers:
    """[m] two-sided p of the paired t test over n sequences, differences [m, n]; NaN with fewer than two.

    Where all differences of a row are equal the statistic's limit stands: 1 if they are 0, else 0.
    """
    rows, count = differences.shape
    if count < 2:
        return np.full(rows, np.nan)
    even = (differences == differences[:, :1]).all(axis=1)
    found = np.where(differences[:, 0] == 0.0, 1.0, 0.0)
    if not even.all():
        found[~even] = stats.ttest_1samp(differences[~even], 0.0, axis=1).pvalue
    return found


def holm(p: Numbers) -> Numbers:
    """[m] p values adjusted for m tests by Holm's step-down procedure (Holm 1979); NaN is no test and stays."""
    adjusted = p.copy()
    tested = np.flatnonzero(~np.isnan(p))
    order = tested[np.argsort(p[tested], kind="stable")]
    factors = np.arange(len(order), 0, -1)
    adjusted[order] = np.minimum(np.maximum.accumulate(factors * p[order]), 1.0)
    return adjusted


def coverage(sequences: int) -> tuple[tuple[float, float], tuple[float, float]] | None:
    """(lowest, highest) share of intervals that held the truth in the study, of the bootstrap and of Student's t, for
    this number of sequences or the next smaller one that was tried; None below two."""
    tried = [count for count in COVERAGE if count <= sequences]
    if not tried:
        return None
    bootstrap, student = COVERAGE[max(tried)]
    return (min(bootstrap), max(bootstrap)), (min(student), max(student))


def interval_entry(sequences: int) -> dict[str, Any] | None:
    """How intervals over so many sequences were made and what they are worth; None for one sequence.

    `coverage` is the lowest that the study found: what can be relied on.
    """
    known = coverage(sequences)
    if known is None:
        return None
    return {
        "level": LEVEL,
        "method": METHOD,
        "resamples": RESAMPLES,
        "seed": SEED,
        "coverage": known[0][0],
        "coverage_range": list(known[0]),
        "t_coverage_range": list(known[1]),
        "note": note(sequences),
    }


def note(sequences: int) -> str:
    """What an interval over so many sequences is worth, in one sentence."""
    known = coverage(sequences)
    if known is None:
        return (
            "one sequence gives no interval: sequences are the independent unit, heads and layers of one move together"
        )
    bootstrap, student = (" to ".join(f"{100 * share:.0f}" for share in shares) for shares in known)
    return (
        f"over {sequences} sequences the 95 % bootstrap interval held the truth {bootstrap} times in 100 in a "
        f"simulation, Student's t {student} times: more sequences make both honest"
    )
