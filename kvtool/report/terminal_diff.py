"""Terminal view of a comparison (rich)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvtool.report.diff_page import diff_page
from kvtool.report.terminal_page import terminal_page


def diff_parts(document: Mapping[str, Any], width: int | None = None) -> list[Any]:
    """The answer of `kvtool diff`.

    Args:
        document: `kvtool.diff/1`.
        width: characters of the terminal, None for no limit.
    """
    return terminal_page(diff_page(document), width)
