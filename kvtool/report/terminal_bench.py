"""Terminal view of a bench: a line per goal (rich)."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from kvtool.bench import Bench
from kvtool.words import printable

WIDE = 120  # characters with room for what a line is compared with


def bench_views(result: Bench, width: int | None = None, everything: bool = True) -> list[Any]:
    """The table, and below it what could not be measured and why.

    Args:
        width: characters of a line, None for no limit.
        everything: also lines that were left out by choice.
    """
    manifest = result.manifest
    lines = [line for line in result.goals if everything or line["name"] in manifest["only"]]
    wide = width is None or width >= WIDE
    version = manifest["versions"]["torch"]
    table = Table(
        title=f"kvtool bench: torch {version}, {manifest['device']}, one thread, {manifest['seconds']:.0f} s",
        caption="measured: median of the rounds, (least … most)",
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("name", no_wrap=True)
    for name in ("measured", "goal", "met", "floor"):
        table.add_column(name, justify="right", no_wrap=True)
    if wide:
        table.add_column("compared with", overflow="fold")
    for line in lines:
        cells = [line["name"], _measured(line), _goal(line), _met(line), _number(line["floor"], line["unit"])]
        table.add_row(*cells, *([line["against"]] if wide else []))
    views: list[Any] = [table]
    for line in lines:
        if line["reason"] is not None:
            views.append(Text(printable(f"{line['name']}: not measured: {line['reason']}"), style="italic"))
    return [*views, Text(_verdict(lines), style="bold")]


def unmet(result: Bench) -> list[str]:
    """Names of the goals that were measured and missed."""
    return [line["name"] for line in result.goals if line["met"] is False]


def _number(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    if unit == "share":
        return f"{100 * value:.1f} %"
    return f"{value:.3g} s" if unit == "seconds" else f"{value:.3g}x"


def _measured(line: dict[str, Any]) -> str:
    text = _number(line["ratio"], line["unit"])
    if line["spread"] is None or line["runs"] < 2:
        return text
    low, high = line["spread"]
    return f"{text} ({low:.3g} … {high:.3g})"


def _goal(line: dict[str, Any]) -> str:
    if line["goal"] is None:
        return "-"
    return f"{'≤' if line['at_most'] else '≥'} {_number(line['goal'], line['unit'])}"


def _met(line: dict[str, Any]) -> Text:
    if line["met"] is None:
        return Text("-")
    return Text("yes", style="green") if line["met"] else Text("no", style="red")


def _verdict(lines: list[dict[str, Any]]) -> str:
    known = [line["met"] for line in lines if line["met"] is not None]
    unknown = sum(line["goal"] is not None and line["met"] is None for line in lines)
    return f"{sum(known)} of {len(known)} measured goals met; {unknown} not measured"
