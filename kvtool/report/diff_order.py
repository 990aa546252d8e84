"""Which metric and which comparison come first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Metrics that order policies, the most telling first; where none was compared the first one there is.
ORDERING = ("predicted_kl", "mean_layer_error", "mean_output_error")
_CONTROLS = ("full", "random")
_ORACLE = "oracle-"


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
    """Sorts groups: those that are worse, in them policies before oracles and controls, then those whose ordering
    metric is worse, then by how much."""
    entry = telling(group)
    first = ordering(group)
    beside = first is None or first["verdict"] != "worse"  # another metric is what is worse
    before = (not worse_metrics(group), _behind(group), beside)
    behaves = {"behaviour": 0, "unknown": 1, "numerics": 2}.get(group["kind"], 3)
    if entry is None or entry["difference"] is None:
        return (*before, behaves, 0.0)
    towards = -1.0 if entry["direction"] == "higher" else 1.0
    relative = entry["difference"] / (abs(entry["a"]) or 1.0)
    size = towards * relative if entry["direction"] != "none" else abs(relative)
    return (*before, behaves, -size)


def gain(group: Mapping[str, Any]) -> tuple[float, ...]:
    """Sorts groups that are better: oracles and controls before policies, then by how much."""
    entry = telling(group)
    size = 0.0 if entry is None or entry["difference"] is None else abs(entry["difference"] / (entry["a"] or 1.0))
    return -_behind(group), size


def _behind(group: Mapping[str, Any]) -> int:
    """Nobody serves with what reads the future, or with what is run beside every policy: 0 for a policy, 1 for an
    oracle, 2 for a control."""
    policy = str(group.get("policy", ""))
    if policy in _CONTROLS:
        return 2
    return int(bool(group.get("oracle", policy.startswith(_ORACLE))))
