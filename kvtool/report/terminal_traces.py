"""Terminal view of two traces held together (rich)."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from rich.table import Table
from rich.text import Text

from kvtool.compare.traces_diff import TracesDiff

_COLUMNS = {"keys": "keys", "values": "values", "queries": "queries", "output_sample": "output"}
MOST_SETTINGS, LONGEST = 12, 40


def traces_tables(diff: TracesDiff) -> list[Any]:
    """The answer of `kvtool diff --traces`: what was set differently, layer by layer, and what that says."""
    parts: list[Any] = [_head(diff)]
    if diff.settings:
        parts += ["", _settings(diff)]
    if diff.layers:
        parts += ["", _layers(diff)]
    style = "red" if diff.parted else "green"
    return [*parts, "", *(Text(sentence, style=style if n == 0 else "") for n, sentence in enumerate(diff.findings()))]


def _head(diff: TracesDiff) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("", "trace", "model", "run in", "stored as", "digest"):
        table.add_column(name, overflow="fold")
    for name, side in (("A", diff.a), ("B", diff.b)):
        words = (name, side["path"], side["model"] or "-", side["run_dtype"], side["stored_dtype"], side["digest"][:12])
        table.add_row(*map(Text, words))
    return table


def _settings(diff: TracesDiff) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", title="settings that differ", title_justify="left")
    for name in ("setting", "A", "B"):
        table.add_column(name, overflow="fold")
    for entry in diff.settings[:MOST_SETTINGS]:
        table.add_row(*map(Text, (entry["name"], _short(entry["a"]), _short(entry["b"]))))
    more = len(diff.settings) - MOST_SETTINGS
    if more > 0:
        table.caption, table.caption_justify = f"and {more} more: --json lists them", "left"
    return table


def _short(value: Any) -> str:
    text = "-" if value is None else str(value)
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def _layers(diff: TracesDiff) -> Table:
    """One line per layer: the worst of its sequences, and how much of it parts."""
    by_layer: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for line in diff.layers:
        by_layer[line["layer"]].append(line)
    names = [name for name in _COLUMNS if any(line["array"] == name for line in diff.layers)]
    table = Table(
        box=None,
        pad_edge=False,
        header_style="bold",
        title="largest deviation of a row, relative to its norm",
        title_justify="left",
    )
    for title in ("layer", "bound", *(_COLUMNS[name] for name in names), "heads that part", "tokens that part"):
        table.add_column(title, justify="right", no_wrap=True)
    for layer, lines in sorted(by_layer.items()):
        mine = {name: [line for line in lines if line["array"] == name and line["rows"]] for name in names}
        heads = sum(line["heads_off"] for line in lines), sum(line["heads"] for line in lines)
        tokens = max(line["tokens_off"] for line in lines)
        table.add_row(
            str(layer),
            f"{lines[0]['bound']:.1e}",
            *(_worst(found) for found in mine.values()),
            f"{heads[0]} of {heads[1]}" if heads[0] else "-",
            str(tokens) if tokens else "-",
        )
    return table


def _worst(lines: list[dict[str, Any]]) -> Text:
    if not lines:
        return Text("-")
    off = any(line["heads_off"] for line in lines)
    values = [line["largest"] for line in lines]
    word = "not finite" if None in values else f"{max(values):.1e}"
    return Text(word, style="red" if off else "")
