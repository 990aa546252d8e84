"""Terminal view of the table `landmarks`: what is known to matter, and who kept it (rich)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from kvtool.result import Result
from kvtool.words import asked

CAPTION = (
    "At the last step, over all layers and KV heads: kept by all, lost by all, or how many of them kept it; "
    "of a landmark of several rows the share of these that were kept."
)


def kept_word(entries: Iterable[Mapping[str, Any]]) -> str:
    """`kept`, `lost`, `2/4` for a single row in some of the heads, `37 %` for a part of several rows."""
    found = list(entries)
    rows, kept = sum(e["rows"] for e in found), sum(e["kept"] for e in found)
    if not found:
        return "-"
    if kept in (0, rows):
        return "kept" if kept else "lost"
    if all(e["rows"] == 1 for e in found):
        return f"{kept}/{rows}"
    # neither 0 nor 100 while some are lost and some are kept
    return f"{min(99, max(1, round(100 * kept / rows)))} %"


def landmark_tables(result: Result) -> list[Any]:
    """One table per ratio or budget and schedule; nothing where the trace has no landmarks.

    Needles in several depths and lengths make a retention map: rows are depths, columns lengths of the prompt.
    Other landmarks have a line each.
    """
    if "landmarks" not in result.tables:
        return []
    entries = [e for e in result.entries("landmarks") if e["policy"] != "full"]
    if not entries:
        return []
    schedules = len({e["schedule"] for e in entries})
    sections: dict[tuple[Any, Any, str], list[dict[str, Any]]] = defaultdict(list)
    for entry in entries:
        sections[entry["ratio"], entry["budget"], entry["schedule"]].append(entry)
    views: list[Any] = []
    for (ratio, budget, schedule), members in sections.items():
        title = f"landmarks, {asked(ratio, budget)}" + (f", {schedule}" if schedules > 1 else "")
        view = _map(members) if all(e["depth"] is not None for e in members) else _lines(members)
        view.title, view.title_justify = Text(title, style="bold"), "left"
        views.append(view)
    views[-1].caption, views[-1].caption_justify = CAPTION, "left"
    return views


def _map(entries: list[dict[str, Any]]) -> Table:
    """Depths below each other, lengths beside each other, for one policy after the other."""
    lengths = sorted({e["prompt_length"] for e in entries})
    depths = sorted({e["depth"] for e in entries})
    table = Table("policy", "depth", *(f"prompt {length}" for length in lengths))
    for policy in dict.fromkeys(e["policy"] for e in entries):
        table.add_section()
        for place, depth in enumerate(depths):
            here = [e for e in entries if e["policy"] == policy and e["depth"] == depth]
            words = (kept_word(e for e in here if e["prompt_length"] == length) for length in lengths)
            table.add_row(Text(policy if place == 0 else ""), f"{depth:g}", *words)
    return table


def _lines(entries: list[dict[str, Any]]) -> Table:
    """A line for every landmark, for one policy after the other."""
    table = Table("policy", "landmark", "rows", "at the end")
    for policy in dict.fromkeys(e["policy"] for e in entries):
        mine = [e for e in entries if e["policy"] == policy]
        for place, name in enumerate(dict.fromkeys(e["landmark"] for e in mine)):
            here = [e for e in mine if e["landmark"] == name]
            sizes = sorted({e["rows"] for e in here})
            table.add_row(Text(policy if place == 0 else ""), Text(name), " or ".join(map(str, sizes)), kept_word(here))
    return table
