"""Which tokens one side of a comparison keeps and the other loses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvtool.report.diff_words import count, number, quoted, sequences_of
from kvtool.report.page import Grid, Part

Document = Mapping[str, Any]


def tokens(group: Document, document: Document) -> list[Part]:
    """Which tokens one side keeps and the other loses."""
    found = group.get("tokens")
    if not found:
        return []
    several = sequences_of(group, document) > 1
    parts: list[Part] = []
    told = (("lost", "A keeps and B loses"), ("gained", "B keeps and A loses"))
    for key, what in told:
        if found[key]:
            parts.append(_token_grid(found[key], f"tokens that {what}", several, not parts))
    return parts


def _token_grid(entries: Sequence[Document], title: str, several: bool, explained: bool) -> Grid:
    rows = [
        {
            "row": str(entry["token"]),
            "position": "-" if entry["position"] is None else str(entry["position"]),
            "text": quoted(entry["text"]),
            "sequence": str(entry["sequence"]),
            "KV heads": f"{entry['heads']} of {entry['of']}",
            "mass": number(entry["attention_mass"]),
            "damage": number(entry["damage"]),
            "worst at": _worst(entry.get("worst")),
        }
        for entry in entries
    ]
    same = all(entry["token"] == entry["position"] for entry in entries)
    told = any(entry["position"] is not None for entry in entries) and not same
    columns = [name for name in rows[0] if (several or name != "sequence") and (told or name != "position")]
    measured = any(entry["damage"] is not None for entry in entries)
    order = "largest sum of damages" if measured else "most KV heads"
    columns = columns if measured else [name for name in columns if name not in ("mass", "damage", "worst at")]
    caption = f"Row: place in the trace{', which is also its position' if same else ''}."
    explains = {
        "KV heads": "KV heads: how many lose it, of those of all layers.",
        "mass": "Mass: share of attention that it had where one side sees it and the other does not.",
        "damage": "Damage: error of losing it alone, relative to the output, root mean square over the heads that lose "
        "it; the order is that of the sum over these heads.",
        "worst at": "Worst at: layer.query head.",
    }
    return Grid(
        columns,
        rows,
        ("row", "text"),
        gives_way=("position", "worst at", "mass"),
        code=("text",),
        explains=explains if explained else {},
        title=f"{title} ({count(len(entries), 'token')}, {order} first{', sequence by sequence' if several else ''})",
        caption=caption,
    )


def _worst(entry: Document | None) -> str:
    return "-" if not entry else f"{number(entry['damage'])} at {entry['layer']}.{entry['q_head']}"
