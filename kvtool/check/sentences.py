"""Sentences: what moved, in words that the table, JSON, JUnit and annotations share."""

from __future__ import annotations

from kvtool.check.digits import Number
from kvtool.check.judge import LayerMove, Row, Value
from kvtool.words import spans

MOST_LAYERS = 6  # whose KV heads are named


def counted(count: int, noun: str) -> str:
    """`1 finding`, `2 findings`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def number(value: Number) -> str:
    return "null" if value is None else f"{value:.6g}"


def gone_sentence(cells: int) -> str:
    """What became of a job that the suite lacks."""
    return f"the baseline has {counted(cells, 'cell')} of a job that the suite lacks"


def change(old: Number, new: Number) -> str:
    """`0.394 to 0.451 (+14.5 %)`."""
    words = f"{number(old)} to {number(new)}"
    if old is None or new is None or old == 0:
        return words
    return f"{words} ({100 * (new - old) / abs(old):+.3g} %)"


def value_sentence(value: Value) -> str:
    """What became of one metric."""
    if value.changed is not None:
        then, now = value.changed
        return f"{value.metric} is of {now} and was of {then}: another number, which is not compared"
    if value.outcome == "missing":
        what = "is no longer there" if value.gone else "is null now"
        return f"{value.metric} {what}, was {number(value.old)}"
    if value.outcome == "new":
        return f"{value.metric} is new, {number(value.new)}"
    return f"{value.metric} {value.outcome}: {change(value.old, value.new)}"


def layers_sentence(layers: list[LayerMove]) -> str:
    """`layer 7 (KV heads 0,2), layer 15 (KV head 1)`; beyond MOST_LAYERS the ids alone."""
    if len(layers) > MOST_LAYERS:
        return f"{len(layers)} layers ({spans(layer.layer for layer in layers)})"
    words = []
    for layer in layers:
        heads = f" (KV head{'s' if len(layer.kv_heads) > 1 else ''} {spans(layer.kv_heads)})" if layer.kv_heads else ""
        words.append(f"layer {layer.layer}{heads}")
    return ", ".join(words)


def decision_sentences(row: Row) -> list[str]:
    """What became of the decisions of one cell, and where."""
    if row.gone:
        return ["the cell is gone: no policy, size, schedule and sequence of the suite makes it"]
    said = []
    for outcome, words in (
        ("moved", "decisions moved in"),
        ("tie", "ties fell otherwise in"),
        ("missing", "decisions missing of"),
        ("new", "decisions new of"),
    ):
        layers = [layer for layer in row.layers if layer.outcome == outcome]
        if layers:
            said.append(f"{words} {layers_sentence(layers)}")
    numbers = [layer for layer in row.layers if layer.outcome == "same" and layer.kind == "numerics"]
    if numbers and not said:
        said.append(f"same decisions, other numbers in {layers_sentence(numbers)}")
    return said


def value_sentences(row: Row) -> list[str]:
    """What became of the metrics of one cell; those within tolerance only where no other moved."""
    if row.gone:
        return []
    loud = [value for value in row.values if value.outcome not in ("same", "within")]
    return [value_sentence(value) for value in loud or row.values if value.outcome != "same"]


def row_sentence(row: Row) -> str:
    """What moved in one cell: its kind, its layers, its metrics."""
    parts = decision_sentences(row) + value_sentences(row)
    return f"{row.kind}: " + "; ".join(parts) if parts else "identical"
