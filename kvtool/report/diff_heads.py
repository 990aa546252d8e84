"""Where a comparison differs: layers, query heads, kept sets and single tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvtool.report.diff_words import count, number, probability, quoted, spelled, times, verdict
from kvtool.report.page import Grid, Line, Part

Document = Mapping[str, Any]

MOST_LAYERS = 8
MOST_HEADS = 5


def layers(group: Document) -> list[Part]:
    """The layers that moved most, with wins and what is kept."""
    entries = [entry for entry in group.get("layers") or () if entry["kind"] != "identical"]
    if not entries:
        return []
    kept = {entry["layer"]: entry for entry in (group.get("kept") or {}).get("by_layer", ())}
    entries.sort(key=lambda entry: -(entry["difference"] or 0.0))
    shown = entries if len(entries) <= MOST_LAYERS else entries[:MOST_LAYERS]
    rows = [
        {
            "layer": str(entry["layer"]),
            "kind": entry["kind"],
            "A": number(entry["a"]),
            "B": number(entry["b"]),
            "B - A": number(entry["difference"], True),
            "verdict": verdict(entry),
            "wins A / B / even": f"{entry['wins_a']} / {entry['wins_b']} / {entry['even']}",
            "Jaccard": _jaccard(kept.get(entry["layer"])),
        }
        for entry in shown
    ]
    measured = any(entry["a"] is not None or entry["b"] is not None for entry in shown)
    tally = {word: sum(entry["verdict"] == word for entry in entries) for word in ("worse", "better", "moved")}
    counted = ", ".join(f"{number_} {word}" for word, number_ in tally.items() if number_)
    caption = f"Layers that differ: {spelled(sorted(e['layer'] for e in entries))}{f' ({counted})' if counted else ''}."
    explains = {
        "wins A / B / even": "Wins: query heads with the smaller output error.",
        "Jaccard": "Jaccard: overlap of what is kept, 1 is the same.",
    }
    title = (f"layers by {shown[0]['metric']}" if measured else "layers") + (
        f", the {len(shown)} most worsened of {len(entries)}" if shown is not entries else ""
    )
    columns: tuple[str, ...] = ("layer", "kind", "A", "B", "B - A", "verdict", "wins A / B / even", "Jaccard")
    columns = columns if measured else ("layer", "kind", "Jaccard")
    gives_way = ("Jaccard", "kind", "A")
    words = ("kind", "verdict")
    return [
        Grid(
            columns, rows, ("layer",), gives_way=gives_way, words=words, title=title, caption=caption, explains=explains
        )
    ]


def _jaccard(entry: Document | None) -> str:
    return "-" if entry is None else f"{entry['jaccard']:.3f}"


def heads(group: Document) -> list[Part]:
    """Who wins, and the query heads that worsened most."""
    found: list[Part] = []
    wins = group.get("wins")
    if wins and wins["a"] + wins["b"] + wins["even"]:
        text = f"Query heads by {wins['metric']}: A is better in {wins['a']}, B in {wins['b']}, even {wins['even']}"
        found.append(Line(f"{text}{_significant(group.get('significant_heads'))}."))
    worst = [entry for entry in group.get("worst_heads") or () if (entry["difference"] or 0) > 0][:MOST_HEADS]
    if not worst:
        return found
    rows = [
        {
            "head": f"{entry['layer']}.{entry['q_head']}",
            "KV head": str(entry["kv_head"]),
            "A": number(entry["a"]),
            "B": number(entry["b"]),
            "B - A": number(entry["difference"], True),
            "B : A": times(entry["ratio"]),
            "p (Holm)": probability(entry["p_holm"]),
            "verdict": verdict(entry),
        }
        for entry in worst
    ]
    known = any(entry["p_holm"] is not None for entry in worst)
    columns = tuple(name for name in rows[0] if known or name != "p (Holm)")
    caption = "Head: layer.query head."
    if known:
        caption += " p: paired t over sequences, raised for the number of heads looked at (Holm)."
    gives_way = ("KV head", "B : A", "A")
    title = "query heads, most worsened first"
    found.append(Grid(columns, rows, ("head",), gives_way, words=("verdict",), title=title, caption=caption))
    return found


def _significant(found: Document | None) -> str:
    if not found or not found["tested"]:
        return ""
    return (
        f"; at p < {found['alpha']:g} after Holm over {found['tested']} heads: "
        f"{found['worse']} worse, {found['better']} better"
    )


def kept(group: Document) -> list[Part]:
    """How alike the kept sets are."""
    found = group.get("kept")
    if not found:
        return []
    if not found["heads_moved"]:
        return [Line(f"Kept sets: the same in all {found['heads']} (one per sequence, layer and KV head).")]
    text = (
        f"Kept sets: {found['heads_moved']} of {found['heads']} differ; Jaccard {found['jaccard']:.3f} on average, "
        f"least {found['jaccard_min']:.3f}"
    )
    worst = found.get("worst")
    if worst:
        text += f" at layer {worst['layer']}, KV head {worst['kv_head']} (sequence {worst['sequence']})"
    if found.get("kept_a") is not None and found["kept_a"] != found["kept_b"]:
        text += f"; per head A keeps {number(found['kept_a'])} tokens, B {number(found['kept_b'])}"
    return [Line(f"{text}.")]


def tokens(group: Document, document: Document) -> list[Part]:
    """Which tokens one side keeps and the other loses."""
    found = group.get("tokens")
    if not found:
        return []
    several = document["sequences"] > 1
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
    columns = columns if measured else [name for name in columns if name not in ("mass", "damage", "worst at")]
    caption = f"Row: place in the trace{', which is also its position' if same else ''}."
    explains = {
        "KV heads": "KV heads: how many lose it, of those of all layers.",
        "mass": "Mass: share of attention that it had where one side sees it and the other does not.",
        "damage": "Damage: error of losing it alone, relative to the output.",
        "worst at": "Worst at: layer.query head.",
    }
    return Grid(
        columns,
        rows,
        ("row", "text"),
        gives_way=("position", "worst at", "mass"),
        code=("text",),
        explains=explains if explained else {},
        title=f"{title} ({count(len(entries), 'token')}, dearest over all heads first)" if measured else title,
        caption=caption,
    )


def _worst(entry: Document | None) -> str:
    return "-" if not entry else f"{number(entry['damage'])} at {entry['layer']}.{entry['q_head']}"
