"""Terminal view of results (rich)."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from kvtool.report.columns import fitting, left_out
from kvtool.report.summary import (
    Line,
    asked_columns,
    error_metric,
    ordering_metric,
    prediction,
    repeats,
    sections,
    verdicts,
)
from kvtool.report.terminal_time import equal_cache_table, over_time, times_table
from kvtool.result import Result


def _number(value: float | None, digits: int = 4) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _nats(value: float | None, spread: float | None = None) -> str:
    """Predicted KL spans orders of magnitude: significant digits, and its standard error behind it."""
    if value is None:
        return "-"
    return f"{value:#.3g}" if spread is None else f"{value:#.3g} ± {spread:.1g}"


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:.5g}"


# Columns in the order in which they stand, and the one in which they give way on a narrow terminal.
_COLUMNS = ("predicted KL", "w32", "error", "layers: least … most", "worst head", "mass", "regret", "kept", "ties")
# What repeating schedules add, between mass and regret.
_REPEATING = ("events", "cache mean", "cache peak", "peak MB", "fallbacks")
_GIVES_WAY = (
    *("ties", "kept", "regret", "w32", "layers: least … most", "events", "fallbacks", "mass", "peak MB", "worst head"),
)


def _cells(line: Line, best: bool) -> dict[str, str]:
    """One line of the table by column."""
    name = line.policy + ("  (oracle)" if line.oracle else "") + ("  best" if best else "")
    name += "  (window decided)" if line.window_decided else ""
    found = {
        "policy": name,
        "schedule": "-" if line.policy == "full" else line.schedule,
        "predicted KL": _nats(line.kl, line.kl_se),
        "w32": _nats(line.kl_w32),
        "error": _number(line.error),
        "layers: least … most": "-" if line.low is None else f"{_number(line.low)} … {_number(line.high)}",
        "worst head": "-" if line.worst is None else f"{line.worst[2]:.3f} at {line.worst[0]}.{line.worst[1]}",
        "mass": _number(line.evicted_mass),
        "regret": _number(line.mass_regret, 2),
        "kept": "-" if line.achieved is None else f"{line.achieved:.6g} of {line.candidates:.6g}",
        "ties": f"{line.ties:g}",
        "events": _count(line.events),
        "cache mean": _count(line.mean_cache_tokens),
        "cache peak": _count(line.peak_cache_tokens),
        "peak MB": "-" if line.peak_cache_bytes is None else f"{line.peak_cache_bytes / 1e6:.4g}",
        "fallbacks": _count(line.fallbacks),
        **{name: "-" if value is None else f"{value:.4g}" for name, value in line.asked.items()},
    }
    if line.no_effect:  # its errors are those of the full cache, and say nothing of the policy
        found |= {"predicted KL": "no effect", "error": "no effect"}
        found |= dict.fromkeys(("w32", "layers: least … most", "worst head", "mass", "regret"), "-")
    return found


def _captions(metric: str, columns: list[str]) -> list[str]:
    """What the columns that are shown mean."""
    said = []
    if "predicted KL" in columns:
        said.append("Predicted KL: nats per step to the full cache's predictions, ± standard error over draws.")
    if "w32" in columns:
        said.append("w32: the same over windows of 32 steps.")
    said.append(f"Error: {metric}, lower is better, 0 is the full cache.")
    if "layers: least … most" in columns:
        said.append("Layers: its spread over them.")
    if "worst head" in columns:
        said.append("Worst head: output error as layer.head.")
    if "mass" in columns:
        said.append("Mass: attention that was evicted.")
    if "regret" in columns:
        said.append("Regret: 1 is the mass oracle.")
    if "cache mean" in columns or "cache peak" in columns:
        said.append("Cache: tokens that a query finds in a KV head.")
    if "peak MB" in columns:
        said.append("Peak MB: keys and values of all layers.")
    if "fallbacks" in columns:
        said.append("Fallbacks: events that the sliding window decided instead, over layers.")
    return [*said, "An oracle reads the future."]


def _said_of(column: dict[str, Any]) -> str:
    """What a column of a metric that was asked for means."""
    better = "" if column["direction"] == "none" else f", {column['direction']} is better"
    return f"{column['name']}: {column['meaning']} ({column['unit']}{better})."


def replay_table(result: Result, width: int | None = None) -> list[Any]:
    """The answer of `kvtool replay`: a table, a verdict per ratio, and what the numbers are.

    Args:
        width: characters of the terminal, None for no limit.
    """
    metric, kl = error_metric(result), ordering_metric(result) == "predicted_kl"
    found = sections(result)
    lines = [(section, line, _cells(line, line is section.winner)) for section in found for line in section.lines]
    offered = [name for name in _COLUMNS if kl or name not in ("predicted KL", "w32")]
    if repeats(result):
        place = offered.index("regret")
        offered = [*offered[:place], *_REPEATING, *offered[place + 1 :]]  # no regret of several events
    always = ["policy", *(["schedule"] if any(len(section.schedules) > 1 for section in found) else [])]
    place = offered.index("error") + 1
    further = asked_columns(result)
    offered = [*offered[:place], *(column["name"] for column in further), *offered[place:]]
    fell_back = any(line.fallbacks for _, line, _ in lines)  # then the column is no matter of room
    gives_way = [name for name in _GIVES_WAY if not (fell_back and name == "fallbacks")]
    columns = fitting(offered, [cells for _, _, cells in lines], width, always=always, gives_way=gives_way)
    caption = " ".join([*_captions(metric, columns), *(_said_of(column) for column in further)])
    manifest = result.manifest
    count = manifest["sequences"]["count"]
    table = Table(
        title=f"{manifest['model']}, {count} sequence{'s' * (count != 1)}, layers {manifest['layers']['text']}",
        title_justify="left",
        caption=caption,
        caption_justify="left",
    )
    for name in always:
        table.add_column(name, overflow="fold")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for section in found:
        table.add_section()
        table.add_row(Text(section.asked, style="bold underline"))
        for owner, line, cells in lines:
            if owner is section and (line.policy != "full" or line is section.line("full")):  # one is enough
                plain = line.oracle or line.policy in ("full", "random")
                style = "bold" if line is section.winner else "dim" if plain else None
                table.add_row(*(Text(cells[name]) for name in (*always, *columns)), style=style)
    open_loop = Text(
        "Open loop: queries come from the full-cache run, so errors do not reach later layers or steps.",
        style="italic",
    )
    closing = [open_loop] if (gap := prediction(result)) is None else [open_loop, Text(gap, style="italic")]
    for metric_asked in manifest["replay"].get("metrics", []):
        if all(column["level"] != "cell" for column in metric_asked["columns"]):
            closing.append(Text(f"{metric_asked['label']} has no number per cell: see --json or -o.", style="italic"))
    if (narrow := left_out(offered, columns)) is not None:
        closing.append(Text(narrow, style="italic"))
    said = [Text(sentence, style="bold") for sentence in verdicts(result)]
    further = [*equal_cache_table(result, found, width), *over_time(result, width), *times_table(result, width)]
    return [table, *said, *closing, *further]
