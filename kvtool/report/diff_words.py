"""Words and numbers of a comparison: what is the same on a terminal and in a pull request."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from kvtool.words import asked, printable, spans

# Metrics that order policies, the most telling first; where none was compared the first one there is.
ORDERING = ("predicted_kl", "mean_layer_error", "mean_output_error")
CONTROLS = ("full", "random")
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
    """Which way it went and what that means: `↑ worse`; `unsure` where an interval holds 0."""
    word = str(entry["verdict"])
    if word in ("same", "within", "undefined"):
        return {"same": "= same", "within": "≈ within", "undefined": "undefined"}[word]
    change = entry.get("difference")
    arrow = "" if not change else "↑ " if change > 0 else "↓ "
    return f"{arrow}{word}{', unsure' if entry.get('sure') is False else ''}"


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
    return f"{number_} {noun}{'s' * (number_ != 1)}"


def _asked(ratio: float | None, budget: int | None) -> str:
    return "the whole cache" if ratio is None and budget is None else asked(ratio, budget)


def group_name(group: Mapping[str, Any]) -> str:
    """`snapkv, ratio 0.75`, with schedule, evaluation, event and place where they tell groups apart."""
    both = [
        _pair(group.get("policy", group.get("policy_a")), group.get("policy_b")),
        _pair(
            _asked(group.get("ratio"), group.get("budget")),
            _asked(group.get("ratio_b"), group.get("budget_b")) if "ratio_b" in group or "budget_b" in group else None,
        ),
        _pair(group.get("schedule"), group.get("schedule_b")),
        _pair(group.get("evaluate"), group.get("evaluate_b")),
    ]
    usual = (None, None, "prompt-end", "live")
    words = [word for word, plain in zip(both, usual, strict=True) if word and word != plain]
    words += [f"event {group['event']}"] if group.get("event") is not None else []
    words += [
        f"{key.replace('kv_head', 'KV head').replace('q_head', 'query head')} {group[key]}"
        for key in ("sequence", "layer", "kv_head", "q_head")
        if group.get(key) is not None
    ]
    return printable(", ".join(words))


def _pair(a: Any, b: Any) -> str | None:
    return None if a is None else str(a) if b is None or b == a else f"{a} → {b}"


def ordering(group: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The metric that this group is judged by first; None where nothing was compared."""
    by_name: dict[str, Mapping[str, Any]] = {e["metric"]: e for e in group["metrics"] if e["a"] is not None}
    return next((by_name[name] for name in ORDERING if name in by_name), next(iter(by_name.values()), None))


def worse_metrics(group: Mapping[str, Any], decides: bool = True) -> list[Mapping[str, Any]]:
    """The metrics that make B worse; without `decides` those that are worse and only explain."""
    return [entry for entry in group["metrics"] if entry["verdict"] == "worse" and entry["decides"] == decides]


def telling(group: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The metric that says what happened: the ordering one, unless only another one is worse."""
    worse = worse_metrics(group)
    first = ordering(group)
    if not worse or (first is not None and first["verdict"] == "worse"):
        return first
    named: dict[str, Mapping[str, Any]] = {entry["metric"]: entry for entry in worse}
    return next((named[name] for name in ORDERING if name in named), worse[0])


def worsening(group: Mapping[str, Any]) -> tuple[float, ...]:
    """Sorts groups, the most worsened first, controls behind policies."""
    entry = telling(group)
    first = ordering(group)
    leads = first is not None and first["verdict"] == "worse"
    severity = 0 if leads else 1 if worse_metrics(group) else 2
    control = group.get("policy") in CONTROLS
    behaves = {"behaviour": 0, "unknown": 1, "numerics": 2}.get(group["kind"], 3)
    if entry is None or entry["difference"] is None:
        return (severity, control, behaves, 0.0)
    towards = -1.0 if entry["direction"] == "higher" else 1.0
    relative = entry["difference"] / (abs(entry["a"]) or 1.0)
    size = towards * relative if entry["direction"] != "none" else abs(relative)
    return (severity, control, behaves, -size)


def layers_that(group: Mapping[str, Any], *kinds: str) -> list[int]:
    """The layers whose kind is one of those, ascending."""
    return sorted({entry["layer"] for entry in group.get("layers") or () if entry["kind"] in kinds})


def spelled(ids: Sequence[int]) -> str:
    """Layers as people write them: `0, 7-9`."""
    return spans(ids).replace(",", ", ")


def next_command(document: Mapping[str, Any]) -> str:
    """What a reader may want to run next."""
    a, b = document["a"], document["b"]
    if not document["groups"]:
        return f"kvtool diff {shlex.quote(str(a['label']))} OTHER holds it against another run"
    if document.get("by"):
        sides = [shlex.quote(str(side["label"])) for side in (a, b)]
        return f"kvtool diff {sides[0]} {sides[1]} --markdown is for a pull request"
    worst = min(document["groups"], key=worsening)
    sides = [f"{side['path']}::{_selector(worst, end)}" for side, end in ((a, "a"), (b, "b"))]
    return f"kvtool diff {shlex.quote(sides[0])} {shlex.quote(sides[1])} --by layer tells every layer apart"


def _selector(group: Mapping[str, Any], side: str) -> str:
    """What picks that side of the group from its result."""
    ratio, budget, schedule = (
        group.get(f"{name}_b", group.get(name)) if side == "b" else group.get(name)
        for name in ("ratio", "budget", "schedule")
    )
    asked_ = ratio if ratio is not None else budget
    label = group.get("policy", group.get(f"policy_{side}"))
    return (
        str(label)
        + (f"@{asked_:g}" if ratio is not None else f"@{asked_}" if budget is not None else "")
        + (f"@{schedule}" if schedule and schedule != "prompt-end" and asked_ is not None else "")
    )
