"""Equal cache: errors at a common mean cache size, so that schedules that hold more do not win by holding more."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from kvtool.report.summary import CONTROLS, Line, Section

ALIKE = 0.01  # relative; caches closer than this are compared as they are
CLOSE = 1e-9  # relative; sizes are means of whole numbers
Point = tuple[float, float]  # mean cache tokens, error


@dataclass(frozen=True)
class Curve:
    """One policy's errors at the common sizes; None where its own points do not reach."""

    policy: str
    schedule: str | None
    errors: list[float | None]


def interpolated(points: Iterable[Point], size: float) -> float | None:
    """The error at `size` on straight lines between neighbouring points, points of one size averaged.

    None outside of the points: nothing is extrapolated.
    """
    by_size: dict[float, list[float]] = {}
    for place, error in sorted(points):
        known = next((s for s in by_size if abs(s - place) <= CLOSE * max(s, place)), place)
        by_size.setdefault(known, []).append(error)
    curve = [(place, fmean(errors)) for place, errors in sorted(by_size.items())]
    for place, error in curve:
        if abs(place - size) <= CLOSE * max(abs(place), abs(size)):
            return error
    for (low, below), (high, above) in itertools.pairwise(curve):
        if low < size < high:
            return below + (above - below) * (size - low) / (high - low)
    return None


def equal_cache(sections: Sequence[Section]) -> tuple[list[float], list[Curve]]:
    """The common sizes, those of the first schedule's cells ascending, and every policy's curve over them, the best
    at the first size first.

    With several budgets a policy has one curve per schedule, else one over its schedules. Nothing where no curve has
    two points, or where the cells of every budget hold the same within a hundredth.
    """
    lines = [ln for section in sections for ln in section.lines if ln.policy != "full" and _known(ln)]
    if not lines:
        return [], []
    several = len(sections) > 1
    points: dict[tuple[str, str | None], list[Point]] = {}
    for line in lines:
        assert line.rank is not None
        assert line.mean_cache_tokens is not None
        key = line.policy, line.schedule if several else None
        points.setdefault(key, []).append((line.mean_cache_tokens, line.rank))
    if all(len(own) < 2 for own in points.values()) or _alike(sections):
        return [], []
    sizes = _sizes(lines, sections[0].schedules[0])
    curves = [Curve(*key, [interpolated(own, size) for size in sizes]) for key, own in points.items()]
    return sizes, sorted(curves, key=lambda curve: [(e is None, e or 0.0) for e in curve.errors])


def _known(line: Line) -> bool:
    return line.rank is not None and line.mean_cache_tokens is not None


def _alike(sections: Sequence[Section]) -> bool:
    """Whether at every budget all cells hold the same number of tokens, so that they are compared as they are."""
    for section in sections:
        held = [
            ln.mean_cache_tokens for ln in section.lines if ln.policy != "full" and ln.mean_cache_tokens is not None
        ]
        if held and max(held) - min(held) > ALIKE * max(held):
            return False
    return True


def _sizes(lines: Sequence[Line], schedule: str) -> list[float]:
    """The sizes of that schedule's cells, one per budget: those of the control, which every run has, else of all."""
    mine: Mapping[bool, list[float]] = {True: [], False: []}
    for line in lines:
        if line.schedule == schedule and line.mean_cache_tokens is not None:
            mine[line.policy in CONTROLS].append(line.mean_cache_tokens)
    found: list[float] = []
    for size in sorted(mine[True] or mine[False]):
        if not found or size - found[-1] > CLOSE * size:
            found.append(size)
    return found
