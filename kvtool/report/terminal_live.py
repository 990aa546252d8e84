"""Terminal view of live results (rich)."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from kvtool.report.live_summary import LiveSection, Parting, live_sections, live_verdicts, parting
from kvtool.result import Result

_WRONG_SHOWN = 3
_CLOSED = "Closed loop: evicted in the model's own cache; errors reach later layers and steps."
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
}


def _number(value: float | None, digits: int) -> str:
    if value is None:
        return "-"
    small = 0 < abs(value) < 10.0**-digits
    return f"{value:.1e}" if small else f"{value:.{digits}f}"


def live_tables(result: Result) -> list[Any]:
    """The answer of `kvtool live`: the table, a verdict per ratio, and with --calibrate how true replay was."""
    sections = live_sections(result)
    parts: list[Any] = [_main_table(result, sections)]
    parts += [Text(sentence, style="bold") for sentence in live_verdicts(result)]
    floor = result.manifest["live"]["full_kl"]
    parts.append(Text(f"{_CLOSED} With nothing evicted the KL is {floor:.1e}: rounding.", style="italic"))
    parts += _continuations(result)
    if result.tables["calibration"].num_rows:
        parts += _calibration(result.entries("calibration"))
    parted = parting(result)
    if parted:
        parts += _parting_table(parted)
    return parts


def _main_table(result: Result, sections: list[LiveSection]) -> Table:
    manifest = result.manifest
    table = Table(
        title=f"{manifest['model']}, {manifest['sequences']['count']} sequence(s), layers {manifest['layers']['text']}",
        title_justify="left",
        caption="KL(full || evicted) and log-likelihoods in nats per step, against the same model's whole cache.",
        caption_justify="left",
    )
    cells = [cell for section in sections for cell in section.cells]
    shown = {name: how for name, how in _SHOWN.items() if any(cell.get(name) is not None for cell in cells)}
    if all(cell.get("measured_kl_targets") == cell["measured_kl"] for cell in cells):
        shown.pop("measured_kl_targets", None)
    table.add_column("policy", no_wrap=True)
    for title in [title for title, _ in shown.values()] + ["kept (mean)"]:
        table.add_column(title, justify="right")
    for section in sections:
        table.add_section()
        table.add_row(Text(section.asked, style="bold underline"))
        for cell in section.cells:
            name = Text(cell["policy"])
            if cell["oracle"]:
                name.append("  oracle", style="dim")
            numbers = [_number(cell.get(column), digits) for column, (_, digits) in shown.items()]
            table.add_row(name, *numbers, f"{cell['achieved']:.6g} of {cell['candidates']:.6g}")
    return table


def _continuations(result: Result) -> list[Any]:
    """The beginning of what the model wrote, a line per cell."""
    found: list[Any] = []
    for cell in result.entries("cells"):
        if cell["sequence"] is not None and cell["generated"] is not None:
            # A model may write anything, terminal control characters included.
            text = "".join(c if c.isprintable() else "\ufffd" for c in " ".join(cell["generated"].split()))
            asked = f"ratio {cell['ratio']:g}" if cell["ratio"] is not None else f"budget {cell['budget']}"
            found.append(Text(f"{cell['sequence']} {cell['policy']} {asked}: {text[:160]}", style="dim"))
    return found


def _calibration(entries: list[dict[str, Any]]) -> list[Any]:
    table = Table(title="predicted against measured, over all cells", title_justify="left")
    for title in ("sequence", "measured", "predictor"):
        table.add_column(title, no_wrap=True)
    for title in ("cells", "rank corr.", "log-log corr.", "predicted / measured: median (range)", "pairs wrong"):
        table.add_column(title, justify="right", no_wrap=True)
    for entry in entries:
        ratio = "-"
        if entry["ratio_median"] is not None:
            ratio = f"{entry['ratio_median']:.2f} ({entry['ratio_low']:.2f} … {entry['ratio_high']:.2f})"
        table.add_row(
            "mean" if entry["sequence"] is None else str(entry["sequence"]),
            entry["measured"],
            entry["predictor"],
            str(entry["cells"]),
            _number(entry["spearman"], 3),
            _number(entry["log_pearson"], 3),
            ratio,
            f"{len(entry['wrong_pairs'])} of {entry['pairs']}",
        )
    parts: list[Any] = [table]
    for entry in entries:
        if entry["sequence"] is None and entry["wrong_pairs"]:
            parts.append(Text(f"{entry['predictor']} puts these the wrong way round ({entry['measured']}):"))
            parts += [Text(f"  {pair}") for pair in entry["wrong_pairs"][:_WRONG_SHOWN]]
            if len(entry["wrong_pairs"]) > _WRONG_SHOWN:
                parts.append(Text(f"  and {len(entry['wrong_pairs']) - _WRONG_SHOWN} more in --json"))
    return parts


def _parting_table(parted: list[Parting]) -> list[Any]:
    table = Table(title="output error per layer: open loop (replay) against closed loop", title_justify="left")
    for title in ("layer", "open", "closed", "closed / open, median of cells", "furthest apart"):
        table.add_column(title, justify="right", no_wrap=True)
    for entry in parted:
        table.add_row(
            str(entry.layer),
            _number(entry.open_error, 4),
            _number(entry.closed_error, 4),
            f"{entry.ratio:.3f}",
            f"{entry.deviation:.1%}" if entry.deviation >= 1e-3 else f"{entry.deviation:.1e}",
        )
    return [table]
