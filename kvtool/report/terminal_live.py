"""Terminal view of live results (rich)."""

from __future__ import annotations

import re
from typing import Any

from rich.table import Table
from rich.text import Text

from kvtool.report.columns import fitting, left_out
from kvtool.report.live_summary import LiveSection, Parting, live_sections, live_verdicts, parting
from kvtool.report.summary import prediction
from kvtool.report.terminal_live_time import timeline_tables
from kvtool.result import Result
from kvtool.words import asked

_WRONG_SHOWN = 3
_CLOSED = {
    "trace": "Closed loop: evicted in the model's own cache; errors reach later layers and steps.",
    "run": "Closed loop: evicted in the model's own cache, decided from what it computes under eviction; errors reach "
    "later layers, steps and decisions.",
}
# Column of the cells -> (title, digits), shown where it has a value.
_SHOWN = {
    "measured_kl": ("measured KL", 5),
    "predicted_kl": ("predicted KL", 5),
    "predicted_kl_w32": ("predicted, w32", 5),
    "measured_kl_targets": ("KL on targets", 5),
    "delta_nll": ("change in nll", 5),
    "top1_agreement": ("top-1 same", 3),
    "answer_loss": ("answer loss", 4),
    "mean_layer_error": ("layer error", 4),
    "closed_layer_error": ("closed layer error", 4),
    "mean_output_error": ("output error", 4),
    "closed_output_error": ("closed output error", 4),
    "generated_same": ("same tokens", 1),
    "decisions_differ": ("decided otherwise", 4),
}
_KEPT, _EVENTS = "kept (mean)", "events"
# The order in which columns give way on a narrow terminal; measured and predicted KL stay.
_GIVES_WAY = (
    *(_KEPT, _EVENTS, "same tokens", "output error", "closed output error", "closed layer error", "predicted, w32"),
    *("top-1 same", "layer error", "KL on targets", "answer loss", "change in nll"),
)
_TITLES = {
    "sequence": "sequence",
    "measured": "measured",
    "predictor": "predictor",
    "cells": "cells",
    "spearman": "rank corr.",
    "log_pearson": "log-log corr.",
    "ratio": "predicted / measured",
    "wrong": "pairs wrong",
}


def _number(value: float | None, digits: int) -> str:
    if value is None:
        return "-"
    small = 0 < abs(value) < 10.0**-digits
    return f"{value:.1e}" if small else f"{value:.{digits}f}"


def live_tables(result: Result, width: int | None = None) -> list[Any]:
    """The answer of `kvtool live`: the table, a verdict per ratio, and with --calibrate how true replay was.

    Args:
        width: characters of the terminal, None for no limit.
    """
    sections = live_sections(result)
    table, narrow = _main_table(result, sections, width)
    parts: list[Any] = [table]
    parts += [Text(sentence, style="bold") for sentence in live_verdicts(result)]
    parts.append(Text(_CLOSED[result.manifest["live"]["decide"]], style="italic"))
    if floor := result.manifest["live"]["full_kl"]:
        parts.append(Text(f"With nothing evicted rounding alone makes a KL of {floor:.1e}.", style="italic"))
    if (gap := prediction(result)) is not None and result.tables["calibration"].num_rows:
        parts.append(Text(gap, style="italic"))
    if narrow is not None:
        parts.append(Text(narrow, style="italic"))
    parts += [Text(line, style="italic") for line in _answers(result)]
    parts += _continuations(result)
    parts += timeline_tables(result, width)
    if calibration := [e for e in result.entries("calibration") if e["step_from"] is None]:
        parts += _calibration(calibration, width)
    parted = parting(result)
    if parted:
        parts += _parting_table(parted)
    return parts


def _shown(cells: list[dict[str, Any]]) -> dict[str, tuple[str, int]]:
    """Column -> (title, digits) of what has a value, further windows of predicted KL behind the second."""
    further = sorted({c for c in cells[0] if re.fullmatch(r"predicted_kl_w\d+", c)} - {*_SHOWN}, key=_window)
    offered: dict[str, tuple[str, int]] = {}
    for name, how in _SHOWN.items():
        offered[name] = how
        if name == "predicted_kl_w32":
            offered |= {column: (f"predicted, w{_window(column)}", 5) for column in further}
    found = {name: how for name, how in offered.items() if any(cell.get(name) is not None for cell in cells)}
    if all(cell.get("measured_kl_targets") == cell["measured_kl"] for cell in cells):
        found.pop("measured_kl_targets", None)
    return found


def _window(column: str) -> int:
    return int(column.removeprefix("predicted_kl_w"))


def _main_table(result: Result, sections: list[LiveSection], width: int | None) -> tuple[Table, str | None]:
    """The table, and what it leaves out."""
    manifest = result.manifest
    count = manifest["sequences"]["count"]
    table = Table(
        title=f"{manifest['model']}, {count} sequence{'s' * (count != 1)}, layers {manifest['layers']['text']}",
        title_justify="left",
        caption="KL(full || evicted) and log-likelihoods in nats per step, against the same model's whole cache.",
        caption_justify="left",
    )
    cells = [cell for section in sections for cell in section.cells]
    shown = _shown(cells)
    texts = {id(cell): _texts(cell, shown) for cell in cells}
    repeats = any(cell["events"] not in (0, 1) for cell in cells)
    offered = [*(title for title, _ in shown.values()), _KEPT, *([_EVENTS] if repeats else [])]
    columns = fitting(offered, list(texts.values()), width, always=("policy",), gives_way=_GIVES_WAY)
    table.add_column("policy", overflow="fold")
    for title in columns:
        table.add_column(title, justify="right", no_wrap=True)
    for section in sections:
        table.add_section()
        table.add_row(Text(section.asked, style="bold underline"))
        for cell in section.cells:
            text = texts[id(cell)]
            table.add_row(Text(text["policy"]), *(text[title] for title in columns))
    return table, left_out(offered, columns)


def _texts(cell: dict[str, Any], shown: dict[str, tuple[str, int]]) -> dict[str, str]:
    """One line of the table by title; what evicted nothing has no numbers to be compared by."""
    said = "  (oracle)" * cell["oracle"] + "  (no effect)" * cell["no_effect"]
    numbers = {title: _number(cell.get(column), digits) for column, (title, digits) in shown.items()}
    kept = "-" if cell["achieved"] is None else f"{cell['achieved']:.6g} of {cell['candidates']:.6g}"
    return {
        "policy": cell["policy"] + said,
        **(dict.fromkeys(numbers, "-") if cell["no_effect"] else numbers),
        _KEPT: kept,
        _EVENTS: f"{cell['events']:.6g}",
    }


def _answers(result: Result) -> list[str]:
    """Where each answer stands and what it costs the full cache."""
    found = []
    for place in result.manifest["live"]["answers"]:
        mine = [c for c in result.entries("cells") if c["sequence"] == place["sequence"]]
        low, high = place["rows"]
        found.append(
            f"answer of sequence {place['sequence']}: rows {low}:{high}, {mine[0]['answer_nll_full']:.4g} nats a token "
            "with the full cache; answer loss is what eviction adds"
        )
    return found


def _continuations(result: Result) -> list[Any]:
    """The beginning of what the model wrote, a line per cell."""
    found: list[Any] = []
    for cell in result.entries("cells"):
        if cell["sequence"] is not None and cell["generated"] is not None:
            # A model may write anything, terminal control characters included.
            text = "".join(c if c.isprintable() else "\ufffd" for c in " ".join(cell["generated"].split()))
            place = f"sequence {cell['sequence']}, {cell['policy']} at {asked(cell['ratio'], cell['budget'])}"
            found.append(Text(f"{place}: {text[:160]}", style="dim"))
    return found


def _calibration(entries: list[dict[str, Any]], width: int | None) -> list[Any]:
    table = Table(title="predicted against measured, over all cells that decide differently", title_justify="left")
    rows = [_calibration_texts(entry) for entry in entries]
    always = ["predictor"]
    offered = [title for title in _TITLES.values() if title not in always]
    gives_way = ["cells", "log-log corr.", "pairs wrong", "sequence", "measured"]
    # A column that says the same everywhere goes first.
    gives_way.sort(key=lambda title: len({row[title] for row in rows}) > 1)
    columns = fitting(offered, rows, width, always=always, gives_way=gives_way)
    columns = [title for title in _TITLES.values() if title in (*always, *columns)]
    for title in columns:
        left = title in ("sequence", "measured", "predictor")
        table.add_column(title, justify="left" if left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(row[title] for title in columns))
    parts: list[Any] = [table]
    parts.append(Text("predicted / measured: median over cells (smallest … largest)", style="italic"))
    for entry in entries:
        if entry["sequence"] is None and entry["wrong_pairs"]:
            parts.append(Text(f"{entry['predictor']} puts these the wrong way round ({entry['measured']}):"))
            parts += [Text(f"  {pair}") for pair in entry["wrong_pairs"][:_WRONG_SHOWN]]
            if len(entry["wrong_pairs"]) > _WRONG_SHOWN:
                parts.append(Text(f"  and {len(entry['wrong_pairs']) - _WRONG_SHOWN} more in --json"))
    return parts


def _calibration_texts(entry: dict[str, Any]) -> dict[str, str]:
    """One line of the table by title."""
    ratio = "-"
    if entry["ratio_median"] is not None:
        middle, low, high = (f"{entry[f'ratio_{end}']:.3g}" for end in ("median", "low", "high"))
        ratio = f"{middle} ({low} … {high})"
    texts = {
        "sequence": "mean" if entry["sequence"] is None else str(entry["sequence"]),
        "measured": entry["measured"],
        "predictor": entry["predictor"],
        "cells": str(entry["cells"]),
        "spearman": _number(entry["spearman"], 3),
        "log_pearson": _number(entry["log_pearson"], 3),
        "ratio": ratio,
        "wrong": f"{len(entry['wrong_pairs'])} of {entry['pairs']}",
    }
    return {title: texts[column] for column, title in _TITLES.items()}


def _parting_table(parted: list[Parting]) -> list[Any]:
    table = Table(
        title="output error per layer, open loop (replay) against closed: means over the cells that evict",
        title_justify="left",
    )
    for title in ("layer", "open", "closed", "closed / open, median of cells", "furthest apart"):
        table.add_column(title, justify="right", no_wrap=True)
    for entry in parted:
        table.add_row(
            str(entry.layer),
            _number(entry.open_error, 4),
            _number(entry.closed_error, 4),
            f"{entry.ratio:.3f}",
            f"{entry.deviation:.1%}" if entry.deviation >= 1e-3 else "below 0.1%",
        )
    return [table]
