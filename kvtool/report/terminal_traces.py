"""Terminal view of two traces held together (rich)."""

from __future__ import annotations

from typing import Any

from kvtool.compare.traces_diff import TracesDiff
from kvtool.report.terminal_page import terminal_page
from kvtool.report.traces_page import traces_page


def traces_tables(diff: TracesDiff, width: int | None = None) -> list[Any]:
    """The answer of `kvtool diff --traces`.

    Args:
        width: characters of the terminal, None for no limit.
    """
    return terminal_page(traces_page(diff), width)
