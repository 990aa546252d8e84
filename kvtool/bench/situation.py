"""Situation: what every part of one bench shares."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from kvtool.bench.timing import Stopwatch


@dataclass(frozen=True)
class Situation:
    """One bench.

    Attributes:
        watch: its clocks and the time there is.
        wanted: names of the goals to measure.
        scratch: an empty folder that is removed afterwards.
        trace: a trace of the user's, or None.
        load: processes that were running or waiting before the start, over the last minute; None where unknown.
        cores: of this machine, those that this process may use.
    """

    watch: Stopwatch
    wanted: frozenset[str]
    scratch: Path
    trace: Path | None = None
    load: float | None = None
    cores: int = 1

    def wants(self, *names: str) -> bool:
        """Whether any of these goals is asked for."""
        return not self.wanted.isdisjoint(names)


def load_before() -> float | None:
    """The load average of the last minute."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
