"""Words and numbers of a comparison: what is the same on a terminal and in a pull request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvtool.words import printable, spans

_DIRECTIONS = {"lower": "↓", "higher": "↑"}
MOST_LETTERS = 24  # of a token's text


def number(value: float | None, signed: bool = False) -> str:
    """Four significant digits, whole counts whole; `-` for null."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    sign = "+" if signed else ""
    if 1000 <= abs(value) < 1e9:
        return f"{value:{sign}.1f}".removesuffix(".0")
    return f"{value:{sign}#.4g}".removesuffix(".")


def times(value: float | None) -> str:
    """A ratio B : A as `1.26x`."""
    if value is None:
        return "-"
    if abs(value) >= 100:
        return f"{value:.3g}x"
    return f"{value:.2f}x" if abs(value - 1) >= 0.01 or value == 1 else f"{value:.4f}x"


def interval(entry: Mapping[str, Any], kind: str = "") -> str:
    """The interval of the difference; `kind` `t_` for Student's."""
    low, high = entry.get(f"{kind}low"), entry.get(f"{kind}high")
    return "-" if low is None or high is None or entry["verdict"] == "same" else f"{_end(low)} … {_end(high)}"


def _end(value: float) -> str:
    return "0" if value == 0 else f"{value:+#.3g}".removesuffix(".")


def probability(value: float | None) -> str:
    if value is None:
        return "-"
    return "< 0.0001" if value < 1e-4 else f"{value:.4f}" if value < 0.1 else f"{value:.2f}"


def verdict(entry: Mapping[str, Any]) -> str:
    """Which way it went and what that means: `↑ worse`; `unsure` where an interval holds 0, `unsure (t)` where
    Student's alone does."""
    word = str(entry["verdict"])
    if word in ("same", "within", "undefined"):
        return {"same": "= same", "within": "≈ within", "undefined": "undefined"}[word]
    change = entry.get("difference")
    arrow = "" if not change else "↑ " if change > 0 else "↓ "
    return f"{arrow}{word}{_doubt(entry)}"


def _doubt(entry: Mapping[str, Any]) -> str:
    if entry.get("sure") is not False:
        return ""
    low, high = entry.get("low"), entry.get("high")
    return ", unsure (t)" if low is not None and high is not None and (low > 0 or high < 0) else ", unsure"


def directed(entry: Mapping[str, Any]) -> str:
    """The metric with an arrow to where it is better."""
    arrow = _DIRECTIONS.get(str(entry.get("direction")), "")
    return f"{entry['metric']} {arrow}".rstrip()


def direction_words(direction: str) -> str:
    return {"lower": "lower is better", "higher": "higher is better"}.get(direction, "neither way is better")


def quoted(text: str | None) -> str:
    """The text of a token in quotes, control characters as escapes, shortened where it is long."""
    if text is None:
        return "-"
    shown = printable(text)
    return f"'{shown}'" if len(shown) <= MOST_LETTERS else f"'{shown[:MOST_LETTERS]}…'"


def count(number_: int, noun: str) -> str:
    """`1 head`, `2 heads`."""
    return f"{number_} {plural(noun, number_)}"


def plural(noun: str, number_: int) -> str:
    return f"{noun}{'s' * (number_ != 1)}"


def layers_that(group: Mapping[str, Any], *kinds: str) -> list[int]:
    """The layers whose kind is one of those, ascending."""
    return sorted({entry["layer"] for entry in group.get("layers") or () if entry["kind"] in kinds})


def spelled(ids: Sequence[int]) -> str:
    """Layers as people write them: `0, 7-9`."""
    return spans(ids).replace(",", ", ")


def sequences_of(group: Mapping[str, Any], document: Mapping[str, Any]) -> int:
    """How many sequences a group is the mean of."""
    return int(group.get("sequences", 1 if group.get("sequence") is not None else document["sequences"]))
