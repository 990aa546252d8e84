"""Sparkline: a few numbers as a few characters."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from statistics import fmean

BLOCKS = "▁▂▃▄▅▆▇█"
PLAIN = "_.:-=+*#"  # for terminals that know ASCII only


def sparkline(values: Sequence[float | None], low: float, high: float, plain: bool = False) -> str:
    """One character a value, `low` the smallest and `high` the tallest; a blank where there is no value."""
    marks = PLAIN if plain else BLOCKS
    width = high - low
    found = ""
    for value in values:
        if value is None:
            found += " "
        else:
            place = 0 if width <= 0 else int((value - low) / width * len(marks))
            found += marks[min(max(place, 0), len(marks) - 1)]
    return found


def condensed(values: Sequence[float | None], most: int) -> list[float | None]:
    """At most `most` values, each the mean of its neighbours that are known."""
    if len(values) <= most:
        return list(values)
    bounds = [round(index * len(values) / most) for index in range(most + 1)]
    groups = [[v for v in values[low:high] if v is not None] for low, high in itertools.pairwise(bounds)]
    return [fmean(group) if group else None for group in groups]
