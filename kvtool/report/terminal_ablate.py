"""Terminal view of a study (rich)."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from kvtool.report.ablate_summary import SHOWN_INTERACTIONS, Block, blocks, caveats, number, sure, verdicts
from kvtool.result import Result

_WIDE, _MIDDLE = 130, 100  # terminals with room for all columns, and for some


def ablate_tables(result: Result, width: int | None = None) -> list[Any]:
    """The answer of `kvtool ablate`: the finding first, then effects, interactions, the path, known policies.

    Args:
        width: characters of the terminal, None for no limit.
    """
    width = _WIDE if width is None else width
    companion = result.manifest["ablate"]["companion"]
    parts: list[Any] = []
    for block in blocks(result):
        parts += [Text(sentence, style="bold") for sentence in verdicts(block)]
        if block.effects:
            parts.append(_effects(block, companion, result, width))
        if block.idle:
            idle = ", ".join(entry["level"] for entry in block.idle)
            parts.append(Text(f"Keep exactly the reference's tokens: {idle}."))
        parts += _interactions(block, width)
        if block.steps:
            parts.append(_path(block, width))
        parts.append(_beside(block, width))
    return [*parts, *(Text(sentence, style="italic") for sentence in caveats(result))]


def _table(title: str, caption: str | None = None) -> Table:
    return Table(title=title, title_justify="left", caption=caption, caption_justify="left")


def _spaced(level: str) -> Text:
    """A narrow column breaks lines between parameters, not inside them."""
    return Text(level.replace(",", ", "))


def _interval(entry: dict[str, Any], digits: int) -> str:
    if entry["low"] is None:
        return "-"
    return f"{number(entry['low'], digits, True)} … {number(entry['high'], digits, True)}"


def _effects(block: Block, companion: str | None, result: Result, width: int) -> Table:
    metric, digits, manifest = block.metric, block.digits, result.manifest
    count = manifest["sequences"]["count"]
    further = _further(companion, width)
    caption = "Effect: mean over the contexts a change was tried in; below 0 is better."
    if "alone" in further:
        caption += " Alone: at the reference."
    if "layers" in further:
        caption += " Tried in: contexts. Layers: how many move the same way."
        caption += " Kept: overlap with the reference's tokens, 1 is the same."
    table = _table(
        f"{manifest['model']}, {count} sequence{'s' * (count != 1)}, layers {manifest['layers']['text']}, ratio "
        f"{block.ratio:g}: what each change does to {metric}",
        f"{caption} Bold: the interval leaves out 0.",
    )
    table.add_column("axis", no_wrap=True)
    table.add_column("change", overflow="fold", min_width=16)
    for name in ("effect", "95 %"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in further:
        table.add_column(name, justify="right", no_wrap=True)
    for entry in block.effects:
        cells = {
            "tried in": str(entry["contexts"]),
            "alone": number(entry["at_reference"], digits, True),
            f"with {companion}": number(entry["with_companion"], digits, True),
            "layers": "-" if entry["layers_agreeing"] is None else f"{entry['layers_agreeing']} of {entry['layers']}",
            "kept": f"{entry['overlap']:.2f}",
        }
        table.add_row(
            entry["axis"],
            _spaced(entry["level"]),
            number(entry["effect"], digits, True),
            _interval(entry, digits),
            *(cells[name] for name in further),
            style="bold" if sure(entry) else None,
        )
    return table


def _further(companion: str | None, width: int) -> list[str]:
    """Columns beside the effect that there is room for."""
    if width < _MIDDLE:
        return []
    pair = [] if companion is None else [f"with {companion}"]
    return ["alone", *pair] if width < _WIDE - 10 else ["tried in", "alone", *pair, "layers", "kept"]


def _interactions(block: Block, width: int) -> list[Any]:
    digits = block.digits
    told = [pair for pair in block.interactions if pair["interaction"]]
    if not told:
        return []
    table = _table(
        f"changes that do not add up, {min(SHOWN_INTERACTIONS, len(told))} largest of {len(block.interactions)} pairs",
        "Interaction: what both do together beyond the sum of each alone; below 0 they help each other.",
    )
    table.add_column("change", overflow="fold", min_width=12)
    table.add_column("and", overflow="fold", min_width=12)
    names = ["interaction", *(["95 %"] if width >= _MIDDLE else []), "alone → with the first"]
    for name in names:
        table.add_column(name, justify="right", no_wrap=name != names[-1])
    for pair in told[:SHOWN_INTERACTIONS]:
        cells = [number(pair["interaction"], digits, True)]
        if width >= _MIDDLE:
            cells.append(_interval(pair, digits))
        cells.append(f"{number(pair['b_alone'], digits, True)} → {number(pair['b_with_a'], digits, True)}")
        style = "bold" if sure(pair) else None
        table.add_row(_spaced(pair["level_a"]), _spaced(pair["level_b"]), *cells, style=style)
    return [table]


def _path(block: Block, width: int) -> Table:
    metric, digits = block.metric, block.digits
    table = _table("from capkv to jacap, one choice at a time")
    table.add_column("step")
    table.add_column(metric, justify="right", no_wrap=True)
    table.add_column("change", justify="right", no_wrap=True)
    if width >= _MIDDLE:
        table.add_column("95 %", justify="right", no_wrap=True)
    table.add_row("capkv", number(block.steps[0]["without"], digits), "")
    for step in block.steps:
        cells = [number(step["with"], digits), number(step["effect"], digits, True)]
        if width >= _MIDDLE:
            cells.append(_interval(step, digits))
        table.add_row(Text(step["level"]), *cells, style="bold" if sure(step) else None)
    return table


def _beside(block: Block, width: int) -> Table:
    metric, digits = block.metric, block.digits
    table = _table("beside known policies")
    table.add_column("policy", overflow="fold")
    table.add_column(metric, justify="right", no_wrap=True)
    for cell in block.beside:
        name = Text(cell["policy"])
        if cell["oracle"]:
            name.append("  (oracle)")
        if cell["policy"] == block.reference["policy"]:
            name.append("  reference")
        elif cell["policy"] == block.best["policy"]:
            name.append("  best tried")
        table.add_row(name, number(cell[metric], digits))
    return table
