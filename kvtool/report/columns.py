"""Columns: which of a table's columns fit into the width there is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence


def fitting(
    columns: Sequence[str],
    rows: Sequence[Mapping[str, str]],
    width: int | None,
    *,
    always: Sequence[str],
    gives_way: Iterable[str],
) -> list[str]:
    """Those of `columns` that fit beside `always`, left out in the order of `gives_way`; the others stay.

    Args:
        columns: titles; `rows` hold the text under each.
        width: characters of a line, None for no limit.
    """
    if width is None:
        return list(columns)
    wide = {name: max(len(name), *(len(row[name]) for row in rows)) for name in (*always, *columns)}
    kept = list(columns)
    for name in gives_way:
        if sum(wide[c] + 3 for c in (*always, *kept)) + 1 <= width:
            break
        if name in kept:
            kept.remove(name)
    return kept


def left_out(offered: Sequence[str], shown: Sequence[str]) -> str | None:
    """A sentence that names what a narrow terminal leaves no room for."""
    missing = [name for name in offered if name not in shown]
    return f"Left out, since the terminal is narrow: {', '.join(missing)}." if missing else None
