"""The table of all groups of a comparison: one line each, the most worsened first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from kvtool.report.diff_metrics import GIVES_WAY, NUMBERS, numbers, with_intervals
from kvtool.report.diff_names import told_apart
from kvtool.report.diff_order import ordering, worse_metrics
from kvtool.report.diff_words import direction_words
from kvtool.report.page import Grid, Part

Document = Mapping[str, Any]

MOST_ROWS = 30
_WORSE_IN = "Worse in: how many of the metrics that decide."
_UNSURE = "A verdict with ? is unsure: 0 lies inside an interval"
_STUDENT = "with (t) inside Student's t alone"


def all_groups(groups: Sequence[Document]) -> list[Part]:
    """One line per group, a table per metric that groups are judged by.

    Args:
        groups: in the order in which they stand. What they have in common is said in the title, and rows say what
            tells them apart.
    """
    common, apart = told_apart(groups)
    by_metric: dict[str, list[tuple[str, Document]]] = defaultdict(list)
    for name, group in zip(apart, groups, strict=True):
        entry = ordering(group)
        by_metric["" if entry is None else str(entry["metric"])].append((name or common, group))
    return [_grid(members, common) for members in by_metric.values()]


def _grid(members: Sequence[tuple[str, Document]], common: str) -> Grid:
    shown = members[:MOST_ROWS]
    rows = [_row(name, group) for name, group in shown]
    first = ordering(members[0][1])
    title = "nothing was compared" if first is None else f"{first['metric']}, {direction_words(first['direction'])}"
    more = len(members) - len(shown)
    return Grid(
        ("compared", "kind", *with_intervals(rows), "worse in"),
        rows,
        ("compared",),
        gives_way=("kind", "worse in", *GIVES_WAY),
        code=("compared",),
        words=("kind", "verdict"),
        bold=frozenset(index for index, (_, group) in enumerate(shown) if worse_metrics(group)),
        title=f"{common}: {title}" if common else title,
        caption=f"and {more} more, which --json lists." if more else None,
        explains={"verdict": _unsure(rows), "worse in": _WORSE_IN},
    )


def _row(name: str, group: Document) -> dict[str, str]:
    entry = ordering(group)
    row = {"compared": name, "kind": str(group["kind"])}
    row |= dict.fromkeys(NUMBERS, "-") if entry is None else numbers(entry)
    row["verdict"] = row["verdict"].replace(", unsure", "?")
    return row | {"worse in": f"{len(worse_metrics(group))} of {sum(e['decides'] for e in group['metrics'])}"}


def _unsure(rows: Sequence[Mapping[str, str]]) -> str:
    """What the marks behind verdicts mean, as far as there are any."""
    verdicts = [row["verdict"] for row in rows]
    if not any("?" in text for text in verdicts):
        return ""
    return f"{_UNSURE}{f', {_STUDENT}' if any('? (t)' in text for text in verdicts) else ''}."
