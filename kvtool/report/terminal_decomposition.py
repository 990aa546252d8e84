"""Terminal view of a decomposition (rich)."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from kvtool.report.decomposition_summary import (
    STEPS,
    TERMS,
    Errors,
    error_sections,
    error_verdicts,
    ladder_verdicts,
    ladders,
)
from kvtool.result import Result
from kvtool.words import spans

_COLUMNS = ("selection", "Taylor", "diagonal", "total", "signal", "largest", "in layers", "worst head")
_NATS = "nats: sel. / Tay. / diag."
# The order in which columns give way on a narrow terminal.
_GIVES_WAY = ("worst head", _NATS, "signal", "in layers", "largest")
_LONGEST, _LONGEST_NAME = 16, 36  # characters of a list of layers, and of a policy before it is folded
_SHORT = {"selection": "select.", "renormalisation": "renorm.", "information": "inform.", "linearity": "linear."}


def _cells(line: Errors, layers: int, oracle: bool) -> dict[str, str]:
    """One line of the table by column."""
    leading = [] if line.largest is None else line.layers[line.largest]
    where = spans(leading) if leading else "-"
    if len(where) > _LONGEST:
        where = f"{len(leading)} of {layers}"
    largest = "-"
    if line.largest is not None:
        largest = f"{'Taylor' if line.largest == 'taylor' else line.largest} {100 * line.share:.0f} %"
    nats = "-" if line.nats is None else " / ".join(f"{line.nats[term]:.1e}" for term in TERMS)
    return {
        "policy": line.policy + ("  (oracle)" if oracle else ""),
        "selection": f"{line.terms['selection']:.3f}",
        "Taylor": f"{line.terms['taylor']:.3f}",
        "diagonal": f"{line.terms['diagonal']:.3f}",
        "total": f"{line.total:.3f}",
        "signal": f"{line.signal:.3f}",
        "largest": largest,
        "in layers": where,
        "worst head": f"{line.worst[2]:.2f} at {line.worst[0]}.{line.worst[1]}",
        _NATS: nats,
    }


def decomposition_tables(result: Result, width: int | None = None) -> list[Any]:
    """The answer of `kvtool replay --decompose`: tables, and what they say in words.

    Args:
        width: characters of the terminal, None for no limit.
    """
    found = error_sections(result)
    if not found:
        return [Text("decomposition: no head has an output over its pool, so there is nothing to tell apart")]
    layers = len({row["layer"] for section in found for rows in section.rows.values() for row in rows})
    oracles = _oracles(result)
    lines = [(section, _cells(line, layers, line.policy in oracles)) for section in found for line in section.lines]
    known = any(line.nats is not None for section in found for line in section.lines)
    offered = [*_COLUMNS, *([_NATS] if known else [])]
    columns = list(offered)
    if width is not None:
        wide = {name: max([len(name), *(len(row[name]) for _, row in lines)]) for name in ("policy", *offered)}
        wide["policy"] = min(max(wide["policy"], *(len(section.asked) for section in found)), _LONGEST_NAME)
        for name in _GIVES_WAY:
            if sum(wide[c] + 3 for c in ("policy", *columns)) + 1 <= width:
                break
            if name in columns:
                columns.remove(name)
    asked = result.manifest["replay"]["decompose"]
    caption = (
        "Medians over heads, relative to the output over the whole pool. selection: what eviction itself did; Taylor: "
        "what linearising costs; diagonal: what dropping competition costs; total: the local picture against the truth."
        " Terms measure that picture, around the policy's own centre where it has one, not what its scores make of it."
    )
    explained = {
        "signal": "signal: what there is to explain.",
        "largest": "largest: the largest of the three medians, and in how many heads it leads.",
        _NATS: "nats: the same terms in nats per step, each head alone.",
    }
    caption = " ".join([caption, *(text for name, text in explained.items() if name in columns)])
    table = Table(
        title=f"decomposition, centre {asked['center']} where a policy has none of its own",
        title_justify="left",
        caption=caption,
        caption_justify="left",
    )
    table.add_column("policy", overflow="fold", min_width=max(len(section.asked) for section in found))
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for section in found:
        table.add_section()
        table.add_row(Text(section.asked, style="bold underline"))
        for owner, cells in lines:
            if owner is section:
                style = "dim" if cells["policy"] in ("full", "random") else None
                table.add_row(Text(cells["policy"]), *(cells[name] for name in columns), style=style)
    parts: list[Any] = [table, *(Text(sentence, style="bold") for sentence in error_verdicts(result))]
    if "ladder" in result.tables:
        parts += [*_ladder(result), *(Text(sentence, style="bold") for sentence in ladder_verdicts(result))]
    if len(columns) < len(offered):
        left = ", ".join(name for name in offered if name not in columns)
        parts.append(Text(f"Left out, since the terminal is narrow: {left}", style="italic"))
    return parts


def _oracles(result: Result) -> set[str]:
    return {policy["label"] for policy in result.manifest["replay"]["policies"] if policy["oracle"]}


def _ladder(result: Result) -> list[Any]:
    """Where the damage on small caches was bought, step by step."""
    asked, found = result.manifest["replay"]["decompose"], ladders(result)
    if not found:
        return []
    table = Table(
        title=f"regret on {asked['samples']} sub-caches per KV head: {asked['keep']} of {asked['pool']} tokens kept",
        title_justify="left",
        caption="Damage beyond the best set, as a share of the output's energy, and the steps that bought it.",
        caption_justify="left",
    )
    table.add_column("policy", overflow="fold")
    for name in ("regret", *(_SHORT.get(step, step) for step in STEPS)):
        table.add_column(name, justify="right", no_wrap=True)
    oracles = _oracles(result)
    for line in found:
        steps = ["-"] * len(STEPS) if line.steps is None else [f"{line.steps[step]:+.2f}" for step in STEPS]
        name = line.policy + ("  (oracle)" if line.policy in oracles else "")
        table.add_row(Text(name), f"{line.total:.3f}", *steps)
    return [table]
