"""Terminal view of ages (rich)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions
from rich.table import Table
from rich.text import Text

from kvtool.report.ages_summary import AgeLine, age_lines
from kvtool.report.columns import fitting, left_out
from kvtool.report.sparkline import sparkline
from kvtool.result import Result

_OFFERED = (
    "median",
    "p90",
    "oldest",
    "sinks",
    "window",
    "flexible",
    "turnover",
    "frozen",
    "prompt alive",
    "decode alive",
)
_GIVES_WAY = ("window", "sinks", "p90", "frozen", "decode alive", "flexible", "oldest", "turnover", "prompt alive")


@dataclass(frozen=True)
class Histogram:
    """One line per policy: its kept tokens by age, every policy's tallest bin as tall as the line."""

    names: list[str]
    counts: list[list[int]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        bins, widest = max(map(len, self.counts), default=0), max(map(len, self.names), default=0)
        yield Text(f"kept tokens by age: 1, 2-3, 4-7, … to {2 ** max(bins - 1, 0):,} rows and more", style="bold")
        for name, counts in zip(self.names, self.counts, strict=True):
            total, padded = sum(counts), [*counts, *[0] * (bins - len(counts))]
            text = f"{name.ljust(widest)}  "
            if total:
                drawn: list[float | None] = [float(count) if count else None for count in padded]
                top = max(range(bins), key=lambda index: padded[index])
                where = f"{2**top:,}-{2 ** (top + 1) - 1:,}" if top else "1"
                text += f"{sparkline(drawn, 0.0, float(max(padded)), options.ascii_only)}  most at {where} "
                text += f"({padded[top] / total:.0%})"
            yield Text(text)


def ages_tables(result: Result, width: int | None = None, by_layer: bool = False) -> list[Any]:
    """What `kvtool replay --ages` adds: a table and a histogram over all layers, `by_layer` a table per layer too.

    Args:
        width: characters of the terminal, None for no limit.
    """
    lines = _full_once(age_lines(result))
    names = [_name(line, several=_several(lines)) + f", {line.asked}" for line in lines]
    found = [*_table(lines, width), Histogram(names, [line.histogram for line in lines])]
    return [*found, *(_table(_full_once(age_lines(result, by_layer=True)), width) if by_layer else [])]


def _full_once(lines: list[AgeLine]) -> list[AgeLine]:
    """The whole cache is as old under every schedule and budget: one line (of each layer) is enough."""
    first: dict[int | None, AgeLine] = {}
    return [line for line in lines if line.policy != "full" or first.setdefault(line.layer, line) is line]


def _several(lines: list[AgeLine]) -> bool:
    return len({line.schedule for line in lines}) > 1


def _name(line: AgeLine, several: bool) -> str:
    return f"{line.policy}, {line.schedule}" if several else line.policy


def _table(lines: list[AgeLine], width: int | None) -> list[Any]:
    several, layered = _several(lines), any(line.layer is not None for line in lines)
    rows = [_texts(line, several) for line in lines]
    always = ["policy", "asked", *(["layer"] if layered else [])]
    columns = fitting(_OFFERED, rows, width, always=always, gives_way=_GIVES_WAY)
    table = Table(title="ages of what is kept" + (", by layer" if layered else ""), title_justify="left")
    for name in (*always, *columns):
        left = name in ("policy", "asked")
        table.add_column(name, justify="left" if left else "right", no_wrap=name != "policy", overflow="fold")
    for row in rows:
        table.add_row(*(Text(row[name]) for name in (*always, *columns)))
    said = (
        "Rows since a token was written: means over all events, right after each, weighted by tokens; full has the end "
        "of the trace alone. Shares of what is kept in %."
    )
    if "turnover" in columns:
        said += " Turnover: candidates that an event evicts."
    if "frozen" in columns:
        said += " Frozen: heads whose choice had not changed for 4 events."
    if "prompt alive" in columns:
        said += " Alive: prompt (decode) tokens in % after 1 / 4 / all exposures to eviction."
    narrow = left_out(_OFFERED, columns)
    return [table, Text(said, style="italic"), *([] if narrow is None else [Text(narrow, style="italic")])]


def _texts(line: AgeLine, several: bool) -> dict[str, str]:
    return {
        "policy": _name(line, several),
        "asked": line.asked,
        "layer": "" if line.layer is None else str(line.layer),
        "median": _rows(line.median),
        "p90": _rows(line.p90),
        "oldest": _rows(line.oldest),
        **{part: _share(getattr(line, part)) for part in ("sinks", "window", "flexible", "turnover", "frozen")},
        **{f"{part} alive": " / ".join(map(_share, line.survival[part])) for part in ("prompt", "decode")},
    }


def _rows(value: float | None) -> str:
    return "-" if value is None else f"{value:.5g}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.3g}"
