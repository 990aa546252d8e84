"""Terminal view of results (rich)."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from kvtool.report.summary import Line, error_metric, ordering_metric, prediction, sections, verdicts
from kvtool.result import Result


def _number(value: float | None, digits: int = 4) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _nats(value: float | None, spread: float | None = None) -> str:
    """Predicted KL spans orders of magnitude: significant digits, and its standard error behind it."""
    if value is None:
        return "-"
    return f"{value:#.3g}" if spread is None else f"{value:#.3g} ± {spread:.1g}"


def _line(table: Table, line: Line, best: bool, kl: bool) -> None:
    name = Text(line.policy)
    if line.oracle:
        name.append("  oracle: reads the future", style="dim")
    if best:
        name.append("  best", style="bold")
    spread = "-" if line.low is None else f"{_number(line.low)} … {_number(line.high)}"
    worst = "-" if line.worst is None else f"{line.worst[2]:.3f} at {line.worst[0]}.{line.worst[1]}"
    kept = "-" if line.achieved is None else f"{line.achieved:.6g} of {line.candidates:.6g}"
    leading = [_nats(line.kl, line.kl_se), _nats(line.kl_w32)] if kl else []
    table.add_row(
        name,
        *leading,
        _number(line.error),
        spread,
        worst,
        _number(line.evicted_mass),
        _number(line.mass_regret, 2),
        kept,
        f"{line.ties:g}",
        style="bold" if best else ("dim" if line.oracle or line.policy in ("full", "random") else None),
    )


def replay_table(result: Result) -> list[Any]:
    """The answer of `kvtool replay`: a table, a verdict per ratio, and what the numbers are."""
    metric, kl = error_metric(result), ordering_metric(result) == "predicted_kl"
    caption = (
        f"{metric}: lower is better, 0 is the full cache. Spread over layers; worst head as layer.head. "
        "Mass: attention that was evicted; regret: 1 is the mass oracle."
    )
    if kl:
        caption = (
            "predicted KL: nats per step to the full cache's predictions, ± standard error over draws; w32: the same "
            f"over windows of 32 steps. Error: {caption}"
        )
    manifest = result.manifest
    table = Table(
        title=f"{manifest['model']}, {manifest['sequences']['count']} sequence(s), layers {manifest['layers']['text']}",
        title_justify="left",
        caption=caption,
        caption_justify="left",
    )
    for name in (
        "policy",
        *(("predicted KL", "w32") if kl else ()),
        "error",
        "layers: least … most",
        "worst head",
        "mass",
        "regret",
        "kept (mean)",
        "ties",
    ):
        table.add_column(name, justify="left" if name == "policy" else "right", no_wrap=True)
    for section in sections(result):
        table.add_section()
        table.add_row(Text(section.asked, style="bold underline"))
        for line in section.lines:
            _line(table, line, line is section.winner, kl)
    open_loop = Text(
        "Open loop: queries come from the full-cache run, so errors do not reach later layers or steps.",
        style="italic",
    )
    closing = [open_loop] if (gap := prediction(result)) is None else [open_loop, Text(gap, style="italic")]
    return [table, *(Text(sentence, style="bold") for sentence in verdicts(result)), *closing]


def policies_table(described: list[dict[str, Any]]) -> Table:
    """One line per policy."""
    table = Table(title="policies", title_justify="left")
    table.add_column("name", no_wrap=True)
    table.add_column("idea")
    table.add_column("parameters")
    for policy in described:
        name = Text(policy["name"])
        if policy["oracle"]:
            name.append(" (oracle)", style="dim")
        table.add_row(name, policy["idea"], ", ".join(f"{p['name']}={p['default']}" for p in policy["parameters"]))
    return table


def policy_page(policy: dict[str, Any]) -> list[Any]:
    """Everything that one policy says of itself."""
    table = Table("parameter", "type", "default")
    for parameter in policy["parameters"]:
        table.add_row(parameter["name"], parameter["type"], str(parameter["default"]))
    needs = ", ".join(policy["needs"]) or "keys and values only"
    return [
        Text(policy["name"], style="bold"),
        Text(policy["text"]),
        table,
        Text(f"needs: {needs}" + ("; reads the future (oracle)" if policy["oracle"] else "")),
    ]
