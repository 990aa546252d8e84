"""The answer of `kvtool diff --traces`, part by part, in the order in which a reader asks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from kvtool.compare.traces_diff import TracesDiff
from kvtool.report.diff_settings import settings
from kvtool.report.page import Grid, Line, Part
from kvtool.words import printable

_ARRAYS = {"keys": "keys", "values": "values", "queries": "queries", "output_sample": "output"}
# What says who ran what where, and how long it may take; no number hangs on it.
_AROUND = ("capture.argv", "capture.machine", "capture.threads", "capture.tool", "capture.versions")


def traces_page(diff: TracesDiff) -> list[Part]:
    """What was compared, what was set differently, what that says, and layer by layer how far rows are apart."""
    parts: list[Part] = [_compared(diff)]
    if not diff.identical:
        parts += settings({"settings": [_judged(entry) for entry in diff.settings]})
    parts += [Line(text, "plain" if number else "bold") for number, text in enumerate(diff.findings())]
    return [*parts, *_layers(diff)]


def _judged(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A setting that says whether it decides numbers."""
    name = str(entry["name"])
    around = any(name == start or name.startswith(f"{start}.") for start in _AROUND)
    return {"decides": not around, **entry}


def _compared(diff: TracesDiff) -> Grid:
    rows = [
        {
            "side": name,
            "trace": printable(str(side["path"])),
            "model": printable(str(side["model"] or "-")),
            "run in": side["run_dtype"],
            "stored as": side["stored_dtype"],
            "digest": f"{side['digest'][:12]}…",
        }
        for name, side in (("A", diff.a), ("B", diff.b))
    ]
    columns = ("side", "trace", "model", "run in", "stored as", "digest")
    words = ("side", "run in", "stored as", "digest")
    return Grid(columns, rows, ("trace", "model"), gives_way=("digest",), code=("trace", "model"), words=words)


def _layers(diff: TracesDiff) -> list[Part]:
    """One line per layer: the worst of its sequences, and how much of it parts."""
    by_layer: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for line in diff.layers:
        by_layer[line["layer"]].append(line)
    if not by_layer:
        return []
    arrays = [name for name in _ARRAYS if any(line["array"] == name for line in diff.layers)]
    rows, parting = [], set()
    for index, (layer, lines) in enumerate(sorted(by_layer.items())):
        off, of = sum(line["heads_off"] for line in lines), sum(line["heads"] for line in lines)
        tokens = max(line["tokens_off"] for line in lines)
        row = {"layer": str(layer), "bound": f"{lines[0]['bound']:.1e}"}
        row |= {_ARRAYS[name]: _worst([one for one in lines if one["array"] == name]) for name in arrays}
        rows.append(row | {"heads": f"{off} of {of}" if off else "-", "tokens": str(tokens) if tokens else "-"})
        parting |= {index} if off else set()
    return [
        Grid(
            tuple(rows[0]),
            rows,
            ("layer",),
            gives_way=("bound",),
            bold=frozenset(parting),
            title="largest deviation of a row, relative to its norm",
            caption="! is beyond the bound of its layer." if parting else None,
            explains={"heads": "Heads, tokens: how many part." if parting else ""},
        )
    ]


def _worst(lines: Sequence[Mapping[str, Any]]) -> str:
    values = [line["largest"] for line in lines if line["rows"]]
    if not values:
        return "-"
    known = [value for value in values if value is not None]
    word = "not finite" if len(known) < len(values) else f"{max(known):.1e}" if any(known) else "0"
    return f"{word} !" if any(line["heads_off"] for line in lines if line["rows"]) else word
