"""Terminal view of what eviction does over decode time (rich)."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from kvtool.report.live_timeline import Course, courses, fitted, trust_over_time
from kvtool.result import Result

_KINDS = ("measured", "predicted")


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1e}" if 0 < value < 1e-4 else f"{value:.4f}"


def timeline_tables(result: Result, width: int | None) -> list[Any]:
    """One table per ratio or budget and schedule of several events: policies by spans, measured above predicted.

    Args:
        width: characters of the terminal, None for no limit; spans are put together until they fit.
    """
    parts: list[Any] = []
    found = courses(result)
    for course in found:
        parts += _course(course, width)
    if found and (sentence := trust_over_time(result)) is not None:
        parts.append(Text(sentence, style="italic"))
    return parts


def _course(course: Course, width: int | None) -> list[Any]:
    predicted = any(value is not None for curve in course.curves for value in curve.predicted)
    kinds = _KINDS if predicted else _KINDS[:1]
    shown = course
    if width is not None:
        beside = max(len(curve.policy) for curve in course.curves) + 3 + 3 + max(map(len, kinds)) + 1
        wide = 3 + max(7, *(len(str(start)) for start, _ in course.spans))
        shown = fitted(course, (width - beside) // wide)
    whose = "" if course.sequence is None else f", sequence {course.sequence}"
    table = Table(
        title=f"KL over decode time, {course.section.asked}{whose}, by the first step of each span",
        title_justify="left",
    )
    table.add_column("policy", overflow="fold")
    table.add_column("KL")
    for start, _ in shown.spans:
        table.add_column(str(start), justify="right", no_wrap=True)
    for curve in shown.curves:
        for kind in kinds:
            values = curve.measured if kind == "measured" else curve.predicted
            table.add_row(Text(curve.policy if kind == kinds[0] else ""), kind, *map(_number, values))
    joined = len(course.spans) > len(shown.spans)
    last = shown.spans[-1][1]
    said = f"The last span ends before step {last}."
    if joined:
        said = (
            f"{len(course.spans)} spans from event to event, put together to fit; the last ends before step {last}. "
            "The table `spans` of -o or --json has each."
        )
    return [table, Text(said, style="italic")]
