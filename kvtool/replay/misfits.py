"""Misfits: what a schedule cannot be combined with."""

from __future__ import annotations

from kvtool.budget import Budget
from kvtool.errors import KvtoolError
from kvtool.schedule import Schedule
from kvtool.triggers import HighWater


def refuse_misfits(schedules: tuple[Schedule, ...], sizes: list[Budget], evaluate: str, decomposes: bool) -> None:
    """Refuse what a schedule cannot be combined with.

    Raises:
        KvtoolError: code `usage`.
    """
    several = len(schedules) > 1 or schedules[0].repeats
    if several and evaluate == "pool":
        raise KvtoolError("usage", "--evaluate pool speaks of one event", "use --evaluate live, or one event")
    if several and decomposes:
        raise KvtoolError(
            "usage", "--decompose speaks of one event", "decompose at the end of the prompt or --evict-at"
        )
    marks = [t.mark for schedule in schedules for t in schedule.triggers if isinstance(t, HighWater)]
    pages = max((s.block for s in schedules if any(isinstance(t, HighWater) for t in s.triggers)), default=1)
    if marks and pages > 1 and any(size.tokens is not None and size.tokens + pages > min(marks) for size in sizes):
        raise KvtoolError(
            "usage",
            f"--high-water {min(marks)} leaves no room for a page of {pages} tokens above the budget",
            f"a mark of at least {max(size.tokens or 0 for size in sizes) + pages}, or smaller pages",
        )
    if marks and any(size.tokens is None or size.tokens >= min(marks) for size in sizes or [Budget.from_ratio("0.5")]):
        raise KvtoolError(
            "usage",
            f"--high-water {min(marks)} needs a budget in tokens below it, the low-water mark",
            f"-b {max(1, min(marks) // 2)}",
        )
