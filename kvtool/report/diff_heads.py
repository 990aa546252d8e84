"""Where a comparison differs: layers, query heads and kept sets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvtool.report.diff_words import count, number, probability, spelled, times, verdict
from kvtool.report.page import Grid, Line, Part

Document = Mapping[str, Any]

MOST_LAYERS = 8
MOST_HEADS = 5


def layers(group: Document) -> list[Part]:
    """The layers that moved most, with wins and what is kept."""
    entries = [entry for entry in group.get("layers") or () if entry["kind"] != "identical"]
    if not entries:
        return []
    of_run = group.get("event") is None  # kept sets are those of the whole run
    kept = {entry["layer"]: entry for entry in (group.get("kept") or {}).get("by_layer", ())} if of_run else {}
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
    are = "Layer that differs" if len(entries) == 1 else "Layers that differ"
    caption = f"{are}: {spelled(sorted(e['layer'] for e in entries))}{f' ({counted})' if counted else ''}."
    explains = {
        "wins A / B / even": "Wins: query heads, of all sequences, with the smaller output error; even: within the "
        "tolerance.",
        "Jaccard": "Jaccard: overlap of what is kept, 1 is the same.",
    }
    title = (f"layers by {shown[0]['metric']}" if measured else "layers") + (
        f", the {len(shown)} most worsened of {len(entries)}" if shown is not entries else ""
    )
    columns: tuple[str, ...] = ("layer", "kind", "A", "B", "B - A", "verdict", "wins A / B / even", "Jaccard")
    columns = columns if measured else ("layer", "kind", "Jaccard")
    columns = columns if kept else tuple(name for name in columns if name != "Jaccard")
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
        text = f"Query heads by {wins['metric']}: A is better in {wins['a']}, B in {wins['b']}"
        text += f", even (within the tolerance) {wins['even']}"
        found.append(Line(f"{text}{_significant(group)}."))
    worst = [entry for entry in group.get("worst_heads") or () if (entry["difference"] or 0) > 0]
    certain = [entry for entry in worst if _certain(entry, group)]
    worst = [*certain, *(entry for entry in worst if entry not in certain)][: max(MOST_HEADS, len(certain))]
    if not worst:
        return found
    rows = [
        {
            "head": _head(entry),
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
    title = "query heads, " + ("those beyond chance first, then " if 0 < len(certain) < len(worst) else "")
    title += "the most worsened first"
    found.append(Grid(columns, rows, ("head",), gives_way, words=("verdict",), title=title, caption=caption))
    return found


def _certain(entry: Document, group: Document) -> bool:
    """Whether the test over sequences, raised for the number of heads, says that this head got worse."""
    found = group.get("significant_heads")
    return found is not None and entry["p_holm"] is not None and entry["p_holm"] <= found["alpha"]


def _significant(group: Document) -> str:
    """How many heads moved beyond chance, and which, as far as they are among the most worsened."""
    found = group.get("significant_heads")
    if not found or not found["tested"]:
        return ""
    listed = [entry for entry in group.get("worst_heads") or () if _certain(entry, group)]
    named = ", ".join(_head(entry) for entry in listed)
    hidden = found["worse"] - len(listed)
    more = ""
    if hidden > 0:
        among = f"the {len(group.get('worst_heads') or ())} most worsened"
        more = f", and {hidden} not among {among}" if listed else f", not among {among}"
    which = f" ({named}{more})" if listed else more
    return (
        f"; at p <= {found['alpha']:g} after Holm over {count(found['tested'], 'head')}: "
        f"{found['worse']} worse{which}, {found['better']} better"
    )


def _head(entry: Document) -> str:
    return f"{entry['layer']}.{entry['q_head']}"


def kept(group: Document) -> list[Part]:
    """How alike the kept sets are."""
    found = group.get("kept")
    if not found or group.get("event") is not None:
        return []  # those of the whole run, which has an entry of its own
    if not found["heads_moved"]:
        everywhere = f"in all {found['heads']}" if found["heads"] > 1 else "on both sides"
        return [Line(f"Kept sets: the same {everywhere} (one per sequence, layer and KV head).")]
    differ = "differs" if found["heads_moved"] == 1 else "differ"
    text = (
        f"Kept sets: {found['heads_moved']} of {found['heads']} {differ}; Jaccard {found['jaccard']:.3f} on average, "
        f"least {found['jaccard_min']:.3f}"
    )
    worst = found.get("worst")
    if worst:
        text += f" at layer {worst['layer']}, KV head {worst['kv_head']} (sequence {worst['sequence']})"
    if found.get("kept_a") is not None and found["kept_a"] != found["kept_b"]:
        text += f"; per KV head A keeps {number(found['kept_a'])} tokens, B {number(found['kept_b'])}"
    return [Line(f"{text}.")]
