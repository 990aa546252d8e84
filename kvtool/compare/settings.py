"""Settings: in which parameters and versions two results differ, what decides their numbers first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvtool.compare.sides import Side

# Dotted beginnings, most important first; what stands in none of them comes before the environment.
ORDER = (
    "trace.digest",
    "policy",
    "ratio",
    "budget",
    "schedule",
    "replay.policies",
    "replay.sinks",
    "replay.window",
    "replay.prefix",
    "replay.budgets",
    "replay.schedules",
    "replay.evaluate",
    "replay.precision",
    "replay",
    "sequences",
    "layers",
    "metrics",
    "live",
    "device",
    "kernels",
    "model",
)
# What leaves every number as it is: where files lie, who ran what when, and what was measured besides. A trace's
# capture is covered by its digest.
IDLE = (
    "environment",
    "trace.path",
    "capture",
    "model",
    "layers.text",
    "sequences.count",
    "replay.telemetry",
    "replay.bin_steps",
    "replay.decompose",
    "replay.kl_windows",
    "live.key_error",
    "live.full_kl",
)
ABSENT = "absent"


def differing_settings(a: Side, b: Side) -> list[dict[str, Any]]:
    """Every parameter that differs: dotted `name`, its value in `a` and in `b`, and whether it `decides` results.

    All that the manifests hold is compared, defaults included. Policies are matched by their label; where each side
    selects one, these two are compared field by field, in the fields that both have.
    """
    ours, theirs = _described(a), _described(b)
    names = [*ours, *(name for name in theirs if name not in ours)]
    found = [
        {"name": name, "a": ours.get(name, ABSENT), "b": theirs.get(name, ABSENT), "decides": not _is_in(name, IDLE)}
        for name in names
        if name not in ours or name not in theirs or ours[name] != theirs[name]
    ]
    both_select = "policy" in a.pins and "policy" in b.pins and a.policy != b.policy
    if both_select:  # another policy has other fields, and its name says so already
        found = [one for one in found if not one["name"].startswith("policy.") or ABSENT not in (one["a"], one["b"])]
    return sorted(found, key=lambda one: (not one["decides"], _rank(one["name"])))


def _rank(name: str) -> int:
    return next((place for place, start in enumerate(ORDER) if _is_in(name, (start,))), len(ORDER))


def _is_in(name: str, starts: tuple[str, ...]) -> bool:
    return any(name == start or name.startswith((f"{start}.", f"{start}[")) for start in starts)


def _described(side: Side) -> dict[str, Any]:
    """Dotted name -> value, of everything that speaks of what the side selects."""
    manifest = dict(side.result.manifest)
    replay = dict(manifest.get("replay") or {})
    policies = {entry["label"]: entry for entry in replay.pop("policies", [])}
    asked = {entry["label"]: entry for entry in replay.pop("metrics", [])}  # besides kvtool's own
    found: dict[str, Any] = {}
    if side.policy is not None:
        found["policy"] = side.policy
        found |= dict(_flat("policy", _fields(policies.get(side.policy, {}))))
    else:
        for label, entry in policies.items():
            found |= dict(_flat(f"replay.policies[{label}]", _fields(entry)))
    for label, entry in asked.items():
        found |= dict(_flat(f"replay.metrics[{label}]", {k: v for k, v in _fields(entry).items() if k != "columns"}))
    if "asked" in side.pins:
        replay.pop("budgets", None)
        found |= {"ratio": side.ratio, "budget": side.budget}
    if side.schedule is not None:
        replay.pop("schedules", None)
        found["schedule"] = side.schedule
    for name, value in {**manifest, "replay": replay}.items():
        found |= dict(_flat(name, value))
    return found


def _fields(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Of a policy or metric: whether it is there at all, its code and everything that its numbers depend on.

    The package is told in one word, and not where it is kvtool itself: its version stands in the environment.
    """
    said = {"class": entry.get("class"), **{key: entry[key] for key in entry if key not in ("label", "class")}}
    package = said.setdefault("package", None)  # results of before it was recorded lack it
    if isinstance(package, Mapping):
        said["package"] = None if package["name"] == "kvtool" else f"{package['name']} {package['version']}"
    return said


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flat(f"{name}.{key}", inner)
    else:
        yield name, value
