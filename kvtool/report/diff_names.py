"""Names of the groups of a comparison: what each speaks of, whole or as far as it differs from the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvtool.words import asked, printable

WHOLE_RUN = "whole run"
_PLACES = {"sequence": "sequence", "layer": "layer", "kv_head": "KV head", "q_head": "query head"}
_USUAL = {"schedule": "prompt-end", "evaluate": "live"}


def _parts(group: Mapping[str, Any]) -> dict[str, str]:
    """What a group speaks of, word by word, in the order in which it is read."""
    asked_b = _asked(group.get("ratio"), group.get("budget"))
    if "ratio_b" in group or "budget_b" in group:
        asked_b = _asked(group.get("ratio_b"), group.get("budget_b"))
    pairs = {
        "policy": (group.get("policy", group.get("policy_a")), group.get("policy_b")),
        "asked": (_asked(group.get("ratio"), group.get("budget")), asked_b),
        "schedule": (group.get("schedule"), group.get("schedule_b")),
        "evaluate": (group.get("evaluate"), group.get("evaluate_b")),
    }
    found = {key: str(a) if b is None or b == a else f"{a} → {b}" for key, (a, b) in pairs.items() if a is not None}
    if group.get("event") is not None:
        found["event"] = f"event {group['event']}"
    found |= {key: f"{word} {group[key]}" for key, word in _PLACES.items() if group.get(key) is not None}
    return found


def _asked(ratio: float | None, budget: int | None) -> str:
    return "the whole cache" if ratio is None and budget is None else asked(ratio, budget)


def by_event(groups: Sequence[Mapping[str, Any]]) -> bool:
    """Whether some group speaks of one event only, so that those of the whole run have to say so."""
    return any(group.get("event") is not None for group in groups)


def group_name(group: Mapping[str, Any], events: bool = False) -> str:
    """`snapkv, ratio 0.75`, with schedule, evaluation, event and place where they are not the usual ones.

    Args:
        events: other groups speak of single events: this one says where it speaks of the whole run.
    """
    found = {key: text for key, text in _parts(group).items() if text != _USUAL.get(key)}
    if events and "event" not in found:
        found["event"] = WHOLE_RUN
    return printable(", ".join(found.values()))


def told_apart(groups: Sequence[Mapping[str, Any]]) -> tuple[str, list[str]]:
    """What all groups have in common, empty where nothing, and of each what tells it apart from the others."""
    each = [_parts(group) for group in groups]
    if by_event(groups):
        each = [{"event": WHOLE_RUN} | parts for parts in each]
    names = [
        key for key in ("policy", "asked", "schedule", "evaluate", *_PLACES, "event") if any(key in p for p in each)
    ]
    apart = [name for name in names if len({parts.get(name) for parts in each}) > 1]
    common = [each[0][name] for name in names if name not in apart and each[0][name] != _USUAL.get(name)]
    rows = [", ".join(parts[name] for name in apart if name in parts) for parts in each]
    return printable(", ".join(common)), [printable(row) for row in rows]
