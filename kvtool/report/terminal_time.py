"""Terminal view of what repeating schedules add: errors over time, equal mean cache, times on this machine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
from rich.console import Console, ConsoleOptions
from rich.table import Table
from rich.text import Text

from kvtool.replay.telemetry import STAGES
from kvtool.report.columns import fitting, left_out
from kvtool.report.equal_cache import equal_cache
from kvtool.report.sparkline import condensed, sparkline
from kvtool.report.summary import Section, error_metric, ordering_metric, repeats, sections
from kvtool.result import Result
from kvtool.words import asked

MOST_MARKS = 32
Values = list[float | None]


@dataclass(frozen=True)
class OverTime:
    """One line per policy: its error from the first to the last evaluated step, all of them on one scale.

    Attributes:
        title: said above.
        lines: (policy, errors by bin).
        width: characters of the terminal, None for no limit.
    """

    title: str
    lines: list[tuple[str, Values]]
    width: int | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        known = [value for _, values in self.lines for value in values if value is not None]
        if not known:
            return
        widest = max(len(name) for name, _ in self.lines)
        marks = MOST_MARKS
        if self.width is not None:
            marks = max(8, min(marks, self.width - widest - 22))
        yield Text(self.title, style="bold")
        for name, values in self.lines:
            mine = [value for value in values if value is not None]
            drawn = sparkline(condensed(values, marks), min(known), max(known), options.ascii_only)
            ends = f"{min(mine):.4f} to {max(mine):.4f}" if mine else "-"
            yield Text(f"{name.ljust(widest)}  {drawn}  {ends}")


def over_time(result: Result, width: int | None = None) -> list[Any]:
    """Per ratio or budget the errors of every policy over the evaluated steps; nothing without such a table."""
    if "timeline" not in result.tables:
        return []
    metric = "mean_layer_error" if error_metric(result) == "mean_layer_error" else "output_error"
    by_cell: dict[tuple[Any, ...], dict[int, Values]] = defaultdict(lambda: defaultdict(list))
    spans: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for entry in result.entries("timeline"):
        if entry["layer"] is None:
            key = entry["ratio"], entry["budget"], entry["policy"], entry["schedule"]
            by_cell[key][entry["sequence"]].append(entry[metric])
            span = entry["step_from"], entry["step_to"]
            if span not in spans[entry["sequence"]]:
                spans[entry["sequence"]].append(span)
    steps = "; ".join(dict.fromkeys(f"steps {known[0][0]} to {known[-1][1] - 1}" for known in spans.values()))
    if ";" in steps:
        steps = f"mean of {len(spans)} sequences, each from its first to its last step"
    found: list[Any] = []
    for section in sections(result):
        several = len(section.schedules) > 1
        lines = []
        for line in section.lines:
            if line.policy == "full" or line.no_effect:
                continue
            of_sequences = list(by_cell[section.ratio, section.budget, line.policy, line.schedule].values())
            name = f"{line.policy}, {line.schedule}" if several else line.policy
            lines.append((name, _mean_curve(of_sequences)))
        if lines:
            found.append(OverTime(f"{metric} over time, {section.asked} ({steps}; one scale)", lines, width))
    return found


def _mean_curve(curves: list[Values]) -> Values:
    """Bin by bin the mean over sequences; longer sequences have longer bins, not more of them."""
    longest = max((len(curve) for curve in curves), default=0)
    found: Values = []
    for index in range(longest):
        known = [c[index] for c in curves if index < len(c) and c[index] is not None]
        found.append(fmean(value for value in known if value is not None) if known else None)
    return found


def equal_cache_table(result: Result, found: list[Section], width: int | None = None) -> list[Any]:
    """Errors at common mean cache sizes; nothing where cells hold the same anyway."""
    sizes, curves = equal_cache(found) if repeats(result) else ([], [])
    if not sizes:
        return []
    several = any(curve.schedule is not None for curve in curves) and len(found[0].schedules) > 1
    titles = [f"{size:.6g} tokens" for size in sizes]
    always = ["policy", "schedule"] if several else ["policy"]
    rows = []
    for curve in curves:
        texts = ["-" if error is None else f"{error:#.3g}" for error in curve.errors]
        row = {"policy": curve.policy, **dict(zip(titles, texts, strict=True))}
        rows.append(row | {"schedule": curve.schedule or ""})
    columns = fitting(titles, rows, width, always=always, gives_way=reversed(titles))
    table = _table("at equal mean cache", always, columns, rows)
    said = Text(
        f"{ordering_metric(result)} where a policy's own cells, on straight lines between them, hold that many tokens "
        "per KV head on average; - is out of their reach.",
        style="italic",
    )
    narrow = left_out(titles, columns)
    return [table, said] if narrow is None else [table, said, Text(narrow, style="italic")]


def times_table(result: Result, width: int | None = None) -> list[Any]:
    """What events cost on this machine: p50, p90 and p99 over events; nothing without telemetry."""
    if "telemetry" not in result.tables:
        return []
    grouped: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for entry in result.entries("telemetry"):
        grouped[entry["policy"], entry["schedule"], entry["ratio"], entry["budget"]].append(entry)
    several = len({key[1] for key in grouped}) > 1
    rows = []
    for (policy, schedule, ratio, budget), entries in grouped.items():
        row = {"policy": policy, "schedule": schedule, "asked": asked(ratio, budget), "events": str(len(entries))}
        for name in ("eviction", *STAGES):
            row[f"{name} ms"] = _percentiles(entry[f"{name}_ms"] for entry in entries)
        peaks = [entry["peak_temporary_bytes"] for entry in entries if entry["peak_temporary_bytes"] is not None]
        row["peak MB"] = f"{max(peaks) / 1e6:.3g}" if peaks else "-"
        rows.append(row)
    if not rows:
        return []
    always = ["policy", "asked", *(["schedule"] if several else [])]
    offered = ["events", "eviction ms", *(f"{name} ms" for name in STAGES), "peak MB"]
    gives_way = ("events", "compaction ms", "selection ms", "peak MB", "factorisation ms", "scoring ms")
    columns = fitting(offered, rows, width, always=always, gives_way=gives_way)
    table = _table("times on this machine, per event and layer", always, columns, rows)
    said = Text("p50 / p90 / p99 over events in milliseconds; they differ from run to run.", style="italic")
    narrow = left_out(offered, columns)
    return [table, said] if narrow is None else [table, said, Text(narrow, style="italic")]


def _table(title: str, always: Sequence[str], columns: Sequence[str], rows: list[dict[str, str]]) -> Table:
    """Names to the left, numbers to the right."""
    table = Table(title=title, title_justify="left")
    for name in (*always, *columns):
        left = name in always
        table.add_column(name, justify="left" if left else "right", no_wrap=not left, overflow="fold")
    for row in rows:
        table.add_row(*(Text(row[name]) for name in (*always, *columns)))
    return table


def _percentiles(values: Iterable[float]) -> str:
    return " / ".join(f"{value:.3g}" for value in np.percentile(list(values), [50, 90, 99]))
