"""Terminal view of a page (rich)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from kvtool.report.columns import fitting, left_out
from kvtool.report.page import Grid, Heading, Line, Part

_NAME = 20  # characters that a column of names gets on a narrow terminal before others give way
_LEAST = 8  # and what it gets in the end
_WORD = 10  # characters that a column of words gets before it is broken between them
_STYLES = {"plain": "", "bold": "bold", "italic": "italic"}


def terminal_page(parts: Sequence[Part], width: int | None = None) -> list[Any]:
    """The parts as rich prints them.

    Args:
        width: characters of the terminal, None for no limit.
    """
    found: list[Any] = []
    before: Part | None = None
    for part in parts:
        finding = isinstance(part, Line) and part.weight == "bold"
        after_finding = isinstance(before, Line) and before.weight == "bold"
        if before is not None and (isinstance(part, Heading) or finding != after_finding or isinstance(part, Grid)):
            found.append(Text(""))
        before = part
        if isinstance(part, Heading):
            found.append(Text(part.text, style="bold underline"))
        elif isinstance(part, Line):
            found.append(Text(part.text, style=_STYLES[part.weight]))
        else:
            found += _table(part, width)
    return found


def _table(grid: Grid, width: int | None) -> list[Any]:
    """The columns that fit; what is left out is said below. Title and caption are texts of their own, since rich makes
    them as narrow as their table."""
    free = [name for name in grid.columns if name not in grid.stays]
    least = {**dict.fromkeys(grid.words, _WORD), **dict.fromkeys(grid.stays, _NAME)}
    measured = [{name: row[name][: least.get(name)] for name in grid.columns} for row in grid.rows]
    fit = fitting(free, measured, width, always=grid.stays, gives_way=grid.gives_way)
    columns = [name for name in grid.columns if name in fit or name in grid.stays]
    wide = _widths(grid, columns, width)
    table = Table()
    for name in columns:
        left = name in grid.stays or name in grid.words
        table.add_column(Text(name), justify="left" if left else "right", overflow="fold", width=wide.get(name))
    for index, row in enumerate(grid.rows):
        cells = [_broken(row[name], wide.get(name)) if name in grid.stays else row[name] for name in columns]
        table.add_row(*(Text(cell) for cell in cells), style="bold" if index in grid.bold else None)
    above = [Text(grid.title, style="italic")] if grid.title else []
    below = (grid.caption_for(columns), left_out(free, fit))
    return [*above, table, *(Text(sentence, style="dim italic") for sentence in below if sentence is not None)]


def _widths(grid: Grid, columns: Sequence[str], width: int | None) -> dict[str, int]:
    """Characters per column: numbers get what they need, words and names share what is left."""
    if width is None:
        return {}
    wide = {name: max(cell_len(text) for text in (name, *(row[name] for row in grid.rows))) for name in columns}
    for soft, least in ((grid.words, _WORD), (grid.stays, _NAME), (grid.stays, _LEAST)):
        while sum(size + 3 for size in wide.values()) + 1 > width:
            name = max((n for n in columns if n in soft and wide[n] > least), key=wide.__getitem__, default=None)
            if name is None:
                break
            wide[name] -= 1
    return wide


def _broken(text: str, width: int | None) -> str:
    """A name too long for its column, to be broken between parameters, not inside them."""
    return text if width is None or cell_len(text) <= width else text.replace(",", ", ").replace(",  ", ", ")
