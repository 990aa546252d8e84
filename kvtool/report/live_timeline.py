"""Timeline of a live run, as plain values that tests can read: predictions between one event and the next."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from kvtool.report.live_summary import LiveSection, live_sections
from kvtool.result import Result


@dataclass(frozen=True)
class Curve:
    """One policy over the spans of its section.

    Attributes:
        spans: half-open ranges of steps.
        measured, predicted: nats per step in each; None where unknown.
    """

    policy: str
    spans: list[tuple[int, int]]
    measured: list[float | None]
    predicted: list[float | None]

    def joined(self, size: int) -> Curve:
        """`size` neighbouring spans at a time put together: means over their steps."""
        groups = [slice(start, start + size) for start in range(0, len(self.spans), size)]
        return replace(
            self,
            spans=[(self.spans[group][0][0], self.spans[group][-1][1]) for group in groups],
            measured=[_weighted(self.measured[group], self.spans[group]) for group in groups],
            predicted=[_weighted(self.predicted[group], self.spans[group]) for group in groups],
        )


def _weighted(values: Sequence[float | None], spans: Sequence[tuple[int, int]]) -> float | None:
    known = [value for value in values if value is not None]
    if len(known) < len(spans):
        return None
    steps = [stop - start for start, stop in spans]
    return sum(value * count for value, count in zip(known, steps, strict=True)) / sum(steps)


@dataclass(frozen=True)
class Course:
    """The curves of one section that have the same spans.

    Attributes:
        sequence: whose they are; None for the means over sequences.
    """

    section: LiveSection
    sequence: int | None
    curves: list[Curve]

    @property
    def spans(self) -> list[tuple[int, int]]:
        return self.curves[0].spans


def courses(result: Result) -> list[Course]:
    """In the order of the main table, `full` and what had no effect left out. Where sequences have no common spans, the
    first one stands for them."""
    entries = result.entries("spans")
    found = []
    for section in live_sections(result):
        mine = [e for e in entries if (e["ratio"], e["budget"], e["schedule"]) == section.key]
        indices = sorted({e["sequence"] for e in mine if e["sequence"] is not None})
        sequence = None if any(e["sequence"] is None for e in mine) else next(iter(indices), None)
        by_spans: dict[tuple[tuple[int, int], ...], list[Curve]] = {}
        for cell in section.cells:
            if cell["policy"] == "full" or cell["no_effect"]:
                continue
            curve = _curve(cell["policy"], [e for e in mine if e["sequence"] == sequence])
            if curve.spans:
                by_spans.setdefault(tuple(curve.spans), []).append(curve)
        found += [Course(section, sequence, curves) for curves in by_spans.values()]
    return found


def _curve(policy: str, entries: list[dict[str, Any]]) -> Curve:
    mine = sorted((e for e in entries if e["policy"] == policy), key=lambda entry: entry["step_from"])
    return Curve(
        policy,
        [(entry["step_from"], entry["step_to"]) for entry in mine],
        [entry["measured_kl"] for entry in mine],
        [entry.get("predicted_kl") for entry in mine],
    )


def fitted(course: Course, columns: int) -> Course:
    """The same in at most `columns` spans."""
    size = math.ceil(len(course.spans) / max(columns, 1))
    return replace(course, curves=[curve.joined(size) for curve in course.curves])


def trust_over_time(result: Result) -> str | None:
    """How well predictions foretell measurements between events, in a sentence; None where that is unknown."""
    entries = [e for e in result.entries("calibration") if e["step_from"] is not None]
    sequence = None if any(e["sequence"] is None for e in entries) else min((e["sequence"] for e in entries), default=0)
    mine = sorted((e for e in entries if e["sequence"] == sequence), key=lambda entry: entry["step_from"])
    ranks = [e["spearman"] for e in mine if e["spearman"] is not None]
    ratios = [e["ratio_median"] for e in mine if e["ratio_median"] is not None]
    if not mine:
        return None
    said = f"Between events ({len(mine)} spans"
    said += ")" if sequence is None else f", sequence {sequence})"
    parts = []
    if ranks:
        parts.append(
            f"rank correlation of predicted with measured KL {median(ranks):.2f}, from {min(ranks):.2f} to "
            f"{max(ranks):.2f}"
        )
    if ratios:
        parts.append(
            f"predicted / measured {ratios[0]:.2f} in the first span, {ratios[-1]:.2f} in the last, from "
            f"{min(ratios):.2f} to {max(ratios):.2f} (medians over cells)"
        )
    return f"{said}: {'; '.join(parts)}." if parts else None
