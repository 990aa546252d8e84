"""Findings: what a comparison found, in sentences that name policy, kind, layers, heads and first tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvtool.compare.columns import HEAD_ERROR, LAYER_ERROR
from kvtool.words import spans

MOST = 12  # sentences of one sort; the groups themselves say the rest
FIRST = ("predicted_kl", "measured_kl", "mean_layer_error", "mean_output_error")  # metrics that are named first
PLACES = ("sequence", "layer", "kv_head", "q_head")
SEVERITY = {"behaviour": 0, "unknown": 1, "numerics": 2}


def name_of(group: Mapping[str, Any]) -> str:
    """A group as sentences call it: `snapkv @0.75`, `snapkv @0.75 against h2o @0.75, layer 3`."""
    a = f"{group.get('policy', group.get('policy_a'))} @{_asked(group, '')}"
    if "policy_b" in group or "ratio_b" in group or "budget_b" in group:
        a += f" against {group.get('policy_b', group.get('policy'))} @{_asked(group, '_b')}"
    if group["schedule"] != "prompt-end":
        a += f" {group['schedule']}"
    if "schedule_b" in group:
        a += f" against {group['schedule_b']}"
    places = [f"event {group['event']}"] if group["event"] is not None else []
    places += [
        f"{place.replace('kv_', 'KV ').replace('q_', 'query ')} {group[place]}" for place in PLACES if place in group
    ]
    return ", ".join([a, *places])


def _asked(group: Mapping[str, Any], end: str) -> str:
    ratio, budget = (group.get(f"{name}{end}", group[name]) for name in ("ratio", "budget"))
    return f"{ratio:g}" if ratio is not None else str(budget)


def kind_sentence(group: Mapping[str, Any], first: str | None) -> str:
    """What sort of change a group saw, where, and the first token of it."""
    kept, name, kind = group["kept"], name_of(group), group["kind"]
    if kind == "unknown":
        return f"unknown: {name} differs, and the results hold no decisions that can be compared"
    if kept is None or not kept["heads_moved"]:
        layers = [entry["layer"] for entry in group["layers"] if entry["kind"] != "identical"]
        return f"{kind}: {name} decides the same and its numbers differ" + (f" in {_layers(layers)}" if layers else "")
    moved = f"{kept['heads_moved']} of {kept['heads']} KV head{'s' * (kept['heads'] != 1)}"
    if kind == "numerics":
        said = f"numerics: {name} keeps other tokens only where rounding decides ({moved})"
    else:
        layers = [entry["layer"] for entry in group["layers"] if entry["kind"] == "behaviour"]
        said = f"behaviour: {name} keeps other tokens in {_layers(layers)} ({moved})"
    return said + (f"; first: {first}" if first else "")


def _layers(layers: Sequence[int]) -> str:
    return f"{'layer' if len(layers) == 1 else 'layers'} {spans(layers)}"


def metric_sentences(groups: Sequence[Mapping[str, Any]], verdict: str) -> list[str]:
    """One per group that has metrics of this verdict: the most telling of them with its numbers, those that decide
    first, the largest relative change before smaller ones."""
    found: list[tuple[bool, float, str]] = []
    for group in groups:
        mine = [entry for entry in group["metrics"] if entry["verdict"] == verdict]
        mine.sort(key=lambda entry: (not entry["decides"], _rank(entry["metric"])))
        if not mine:
            continue
        first, size = mine[0], math.inf
        change = spread = more = ""
        if first["ratio"] is not None:
            size, change = abs(first["ratio"] - 1), f" ({100 * (first['ratio'] - 1):+.3g} %)"
        if first["low"] is not None:
            spread = f", 95 % {first['low']:.4g} to {first['high']:.4g}"
            spread += "" if first["sure"] else ", which may be chance"
        others = [name for name in dict.fromkeys(e["metric"] for e in mine) if name != first["metric"]]
        if others:
            more = f"; also {', '.join(others[:4])}" + (f" and {len(others) - 4} more" if len(others) > 4 else "")
        numbers = f"{first['metric']} {first['a']:.4g} to {first['b']:.4g}{change}{spread}"
        word = verdict if first["decides"] else f"{verdict} in detail only"
        found.append((not first["decides"], -size, f"{word}: {name_of(group)} {numbers}{more}"))
    return [sentence for *_, sentence in sorted(found, key=lambda one: one[:2])]


def _rank(metric: str) -> int:
    order = (*FIRST, LAYER_ERROR, *HEAD_ERROR)
    return order.index(metric) if metric in order else len(order)


def hole_sentences(only: Iterable[Mapping[str, Any]], side: str) -> list[str]:
    """Rows that one side lacks, added up per cell."""
    cells: dict[str, dict[str, int]] = {}
    for entry in only:
        name = f"{entry['policy']} @{_asked(entry, '')}"
        name += f" {entry['schedule']}" if entry["schedule"] != "prompt-end" else ""
        tables = cells.setdefault(name, {})
        tables[entry["table"]] = tables.get(entry["table"], 0) + entry["rows"]
    other = "B" if side == "A" else "A"
    found = []
    for name, tables in cells.items():
        counted = ", ".join(f"{rows} of {table}" for table, rows in tables.items())
        found.append(f"only in {side}: {name} has entries without a partner in {other} ({counted})")
    return found


def capped(sentences: Sequence[str], what: str) -> list[str]:
    """The first MOST, and how many more there are."""
    rest = len(sentences) - MOST
    return [*sentences[:MOST], *([f"and {rest} more {what}"] if rest > 0 else [])]
