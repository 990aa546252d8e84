"""Settings: what a decomposition was asked for, checked before anything runs."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from kvtool.errors import KvtoolError
from kvtool.registry import did_you_mean

Center = Literal["rope_mean", "prompt", "past", "future"]
CENTERS: tuple[str, ...] = get_args(Center)
MOST_SUBSETS = 2_000_000
VERSION = 1  # raised whenever a column of the tables changes its meaning
DRAWS = 10_000  # of the Monte-Carlo capacity
RESIDUAL_QUERIES = 16  # along which the derivative is held against finite differences
EXCLUDE = 4  # first queries left out of past statistics: outliers in most models


@dataclass(frozen=True)
class Decompose:
    """What `--decompose` does.

    Attributes:
        center: where policies without query statistics of their own are linearised: the mean of past queries
            turned to future positions, of the prompt's queries, of all past queries, or of the evaluated ones.
        horizon: most queries from the event on that are evaluated, and positions that `rope_mean` turns to.
        samples: sub-caches drawn per KV head for exact search; 0 leaves the search out.
        pool: tokens of a sub-cache.
        keep: how many of them are kept.
        seed: of every random draw.
    """

    center: Center = "rope_mean"
    horizon: int = 512
    samples: int = 64
    pool: int = 16
    keep: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        if self.center not in CENTERS:
            raise KvtoolError("usage", f"--center {self.center} is unknown", did_you_mean(self.center, list(CENTERS)))
        if self.horizon < 1:
            raise KvtoolError("usage", f"--horizon {self.horizon} leaves no query to evaluate", "the default is 512")
        if self.samples < 0:
            raise KvtoolError("usage", f"--samples {self.samples} is below 0", "0 leaves exact search out")
        if not 1 <= self.keep < self.pool:
            raise KvtoolError(
                "usage",
                f"--keep {self.keep} of --pool {self.pool} leaves nothing to choose",
                "keep at least 1 token, and fewer than the pool holds",
            )
        if self.samples and self.subsets > MOST_SUBSETS:
            raise KvtoolError(
                "usage",
                f"exact search over --pool {self.pool} --keep {self.keep} means {self.subsets:,} subsets a sub-cache, "
                f"and {MOST_SUBSETS:,} are allowed",
                "a smaller --pool, or --samples 0 to leave exact search out",
            )

    @property
    def subsets(self) -> int:
        """How many sets exact search looks at in one sub-cache."""
        return math.comb(self.pool, self.keep)

    def describe(self) -> dict[str, Any]:
        """Everything that decides the numbers, for manifest and keys."""
        fixed = {"draws": DRAWS, "residual_queries": RESIDUAL_QUERIES, "exclude": EXCLUDE, "version": VERSION}
        return {**asdict(self), **fixed}


def asked_for(decompose: bool, **choices: Any) -> Decompose | None:
    """The settings of a replay, None where no decomposition was asked for.

    Raises:
        KvtoolError: `usage`, also for a choice that would be ignored.
    """
    asked = Decompose(**choices)
    if decompose:
        return asked
    ignored = [f.name for f in fields(asked) if getattr(asked, f.name) != f.default]
    if ignored:
        raise KvtoolError(
            "usage", f"--{ignored[0]} speaks of a decomposition, and none was asked for", "add --decompose"
        )
    return None
