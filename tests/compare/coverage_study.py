"""How often intervals over few sequences hold the truth: run it, and it prints the table that kvtool quotes.

    python tests/compare/coverage_study.py

Paired differences are drawn from laws whose mean is known, an interval is made from each draw, and the share of
intervals that hold the mean is counted. `policies` draws from real differences: what each sequence of a sample trace
loses per head when one policy is replaced by another.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from kvtool.compare.statistics import LEVEL, intervals
from kvtool.replay import replay

COUNTS = (2, 3, 4, 6, 8, 16, 32)
SAMPLES = Path(__file__).resolve().parents[2] / "sample_traces"
Numbers = NDArray[np.float64]
Draw = Callable[[np.random.Generator, tuple[int, int]], Numbers]


@cache
def real_differences() -> Numbers:
    """[n] by how much a head's output error changes from snapkv to h2o, per sequence, layer and head."""
    rows = replay(SAMPLES / "smollm2.zarr", ["snapkv", "h2o"], ratios=["0.75"]).entries("rows")
    error = {
        name: np.array([row["output_error"] for row in rows if row["policy"] == name]) for name in ("snapkv", "h2o")
    }
    return error["h2o"] - error["snapkv"]


def laws() -> dict[str, tuple[Draw, float]]:
    """Name -> (how to draw [m, n], the mean)."""
    real = real_differences()
    return {
        "normal": (lambda random, shape: random.normal(0.2, 1.0, shape), 0.2),
        "log-normal": (lambda random, shape: random.lognormal(0.0, 1.0, shape), float(np.exp(0.5))),
        "policies": (lambda random, shape: random.choice(real, shape), float(real.mean())),
    }


def bca(differences: Numbers) -> tuple[Numbers, Numbers]:
    """The bias-corrected and accelerated bootstrap, for the comparison; NaN counts as a miss."""
    with np.errstate(all="ignore"):
        found = stats.bootstrap(
            (differences,), np.mean, axis=-1, n_resamples=1999, confidence_level=LEVEL, method="BCa",
            rng=np.random.default_rng(0),
        ).confidence_interval  # fmt: skip
    return found.low, found.high


def covered(count: int, law: str, draws: int, seed: int = 1, with_bca: bool = True) -> dict[str, float]:
    """Share of intervals over `count` sequences that hold the mean, by method."""
    draw, mean = laws()[law]
    differences = draw(np.random.default_rng(seed), (draws, count))
    found = intervals(differences)
    ends = {"percentile": (found.low, found.high), "Student's t": (found.t_low, found.t_high)}
    if with_bca:
        ends["BCa"] = bca(differences)
    return {method: float(((low <= mean) & (mean <= high)).mean()) for method, (low, high) in ends.items()}


def main() -> None:
    print(f"{'law':<12} {'method':<12} " + " ".join(f"{count:>6}" for count in COUNTS))
    for law in laws():
        table = [covered(count, law, draws=4000) for count in COUNTS]
        for method in table[0]:
            print(f"{law:<12} {method:<12} " + " ".join(f"{100 * found[method]:>6.1f}" for found in table))


if __name__ == "__main__":
    main()
