"""Tables of `kvtool inspect`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from kvtool.trace.gradients import drawn
from kvtool.words import size, spans

MOST_WORDS = 120


def _table(title: str, *columns: str) -> Table:
    table = Table(title=Text(title, style="bold"), title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        numeric = column in ("sequence", "tokens", "prompt", "after it", "on disk", "Tq", "heads", "D", "Dv", "scale")
        table.add_column(Text(column), justify="right" if numeric else "left", overflow="fold")
    return table


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif value is not None:
            text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
            yield prefix + name, text if len(text) <= MOST_WORDS else text[: MOST_WORDS - 1] + "…"


def head_table(found: Mapping[str, Any]) -> Table:
    """What the whole trace is, and its manifest."""
    table = Table(title=Text(found["path"], style="bold"), title_justify="left", box=None, show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("digest", Text(found["digest"]))
    table.add_row("size", f"{size(found['bytes'])} in {found['files']} files, stored as {found['stored_dtype']}")
    for name, text in _flat(found["manifest"]):
        table.add_row(Text(name), Text(text))
    return table


def sequence_table(found: Mapping[str, Any]) -> Table:
    """One row a sequence."""
    table = _table("sequences", "sequence", "id", "tokens", "prompt", "after it", "layers", "on disk", "gradients")
    for row in found["sequences"]:
        table.add_row(
            str(row["sequence"]),
            Text(row["id"] or "-"),
            str(row["tokens"]),
            str(row["prompt_length"]),
            str(row["tokens"] - row["prompt_length"]),
            str(len(row["layers"])),
            size(row["bytes"]),
            "-" if row["gradients"] is None else drawn(row["gradients"]),
        )
    return table


def landmark_table(found: Mapping[str, Any]) -> Table:
    """The rows that have a name, a line each, and what is known of a constructed sequence."""
    table = _table("landmarks", "sequence", "landmark", "rows", "known answer")
    for row in found["sequences"]:
        answer = (row["synthetic"] or {}).get("answer", "-")
        for name, rows in (row["landmarks"] or {"-": []}).items():
            table.add_row(str(row["sequence"]), Text(name), spans(rows) if rows else "-", Text(answer))
            answer = ""
    return table


def layer_table(found: Mapping[str, Any]) -> Table:
    """One row a layer, as its first sequence holds it."""
    table = _table("layers", "layer", "heads", "D", "Dv", "attention", "scale", "rotation", "Tq", "also stored")
    seen: set[int] = set()
    for sequence in found["sequences"]:
        for row in sequence["layers"]:
            if row["layer"] in seen:
                continue
            seen.add(row["layer"])
            attention = row["kind"] if row["window"] is None else f"{row['kind']} {row['window']}"
            attention += "" if row["softcap"] is None else f", softcap {row['softcap']:g}"
            attention += ", sink logits" if row["sink_logits"] else ""
            attention += "" if row["kv_source"] is None else f", KV of layer {row['kv_source']}"
            extras = [name for name in ("output_projection", "output_sample", "output_gradients") if row[name]]
            table.add_row(
                str(row["layer"]),
                f"{row['query_heads']}/{row['kv_heads']}",
                str(row["key_dim"]),
                str(row["value_dim"]),
                attention,
                f"{row['scale']:.6g}",
                row["rotation"] + ("" if row["keys_rotated"] else ", keys stored unrotated"),
                str(row["queries"]),
                ", ".join(extras) or "-",
            )
    return table


def serving_table(rows: Iterable[Mapping[str, Any]]) -> Table:
    """What can be replayed on this trace, and what is missing for the rest."""
    rows = list(rows)
    table = _table("what this trace can serve", "kind", "served", "name", "why not")
    for kind in dict.fromkeys(row["kind"] for row in rows):
        served = [row["name"] for row in rows if row["kind"] == kind and row["ok"]]
        table.add_row(kind, "yes", Text(", ".join(served) or "none"), "")
        missing: dict[str, list[str]] = {}
        for row in rows:
            if row["kind"] == kind and not row["ok"]:
                missing.setdefault(row["reason"] or "", []).append(row["name"])
        for reason, names in missing.items():
            table.add_row(kind, "no", Text(", ".join(names)), Text(reason))
    return table


def recompute_table(rows: Iterable[Mapping[str, Any]]) -> Table:
    """Attention recomputed from the arrays, against the model's own output."""
    table = _table(
        "attention recomputed in float64", "sequence", "layer", "steps", "relative error", "bound", "verdict"
    )
    for row in rows:
        error = "not finite" if row["error"] is None else f"{row['error']:.3g}"
        error = error if row["steps"] else "no output sample stored: skipped"
        verdict = ("good" if row["ok"] else "off") if row["steps"] else "-"
        table.add_row(str(row["sequence"]), str(row["layer"]), str(row["steps"]), error, f"{row['bound']:g}", verdict)
    return table


def damage_table(rows: Iterable[Mapping[str, str]]) -> Table:
    """Every file that is not what was written."""
    table = _table("damage", "file", "what")
    for row in rows:
        table.add_row(Text(row["path"]), Text(row["what"]))
    return table
