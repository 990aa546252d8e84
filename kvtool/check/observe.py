"""Observe: what a baseline holds of one result."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from statistics import fmean
from typing import Any

import numpy as np

from kvtool.check.digits import stored
from kvtool.check.judge import Number
from kvtool.check.measures import Measure
from kvtool.check.suite import Job
from kvtool.result import Result


def cell_name(entry: Mapping[str, Any]) -> str:
    """`snapkv @0.5 prompt-end sequence 0`: what was asked and where."""
    asked = entry["budget"] if entry["ratio"] is None else entry["ratio"]
    return f"{entry['policy']} @{asked} {entry['schedule']} sequence {entry['sequence']}"


def observe(job: Job, columns: Mapping[str, Measure], result: Result) -> dict[str, Any]:
    """The entry of a baseline that says what `result` says, with all digits.

    Args:
        columns: what is recorded of every cell.
    """
    replay = result.manifest["replay"]
    return {
        "trace": result.manifest["trace"]["digest"],
        "settings": {
            **{key: replay[key] for key in ("evaluate", "precision", "prefix", "sinks", "window")},
            "layers": result.manifest["layers"]["text"],
        },
        "metrics": {name: one.version for name, one in columns.items() if one.version is not None},
        "cells": _cells(result, columns),
        "decisions": _decisions(result) if job.decisions else {},
    }


def _cells(result: Result, columns: Mapping[str, Measure]) -> dict[str, dict[str, Number]]:
    found: dict[str, dict[str, Number]] = {}
    for entry in result.entries("cells"):
        if entry["sequence"] is not None and entry["event"] is None:
            found[cell_name(entry)] = {name: entry[name] for name, one in columns.items() if one.table == "cells"}
    for table in ("layers", "rows"):
        names = [name for name, one in columns.items() if one.table == table]
        parts: dict[str, dict[str, list[float]]] = {}
        for entry in result.entries(table) if names else ():
            if entry["event"] is None:
                of_cell = parts.setdefault(cell_name(entry), {name: [] for name in names})
                for name in names:
                    of_cell[name] += [] if entry[name] is None else [float(entry[name])]
        for cell, known in parts.items():
            found[cell] |= {name: fmean(values) if values else None for name, values in known.items()}
    return found


def _decisions(result: Result) -> dict[str, dict[str, Any]]:
    """Per cell and layer the digest of its evict steps, and head by head a short one, what stayed, how many stood at
    the cut. `error` only serves to say which layers moved where decisions did not."""
    errors = _layer_errors(result)
    found: dict[str, dict[str, Any]] = {}
    for entry in result.entries("evict_steps"):
        key = f"{cell_name(entry)} layer {entry['layer']}"
        empty: dict[str, Any] = {"heads": [], "kept": [], "near_ties": []}
        layer = found.setdefault(key, {"digest": entry["digest"][:20], "error": errors.get(key), **empty})
        steps = np.asarray(entry["evict_step"], dtype="<i4")
        layer["heads"].append(hashlib.sha256(steps.tobytes()).hexdigest()[:8])
        layer["kept"].append(int((steps == len(steps)).sum()))
        layer["near_ties"].append(sum(entry["event_near_ties"]))
    return found


def _layer_errors(result: Result) -> dict[str, Number]:
    """`… layer 7` -> its layer error, else the mean of its heads' output errors."""
    heads: dict[str, list[float]] = {}
    for entry in result.entries("rows"):
        if entry["event"] is None and entry["output_error"] is not None:
            heads.setdefault(f"{cell_name(entry)} layer {entry['layer']}", []).append(entry["output_error"])
    found: dict[str, Number] = {key: fmean(values) for key, values in heads.items()}
    for entry in result.entries("layers"):
        if entry["event"] is None and entry["layer_error"] is not None:
            found[f"{cell_name(entry)} layer {entry['layer']}"] = entry["layer_error"]
    return found


def merged(old: Mapping[str, Any] | None, new: Mapping[str, Any], steady: Any) -> dict[str, Any]:
    """What an update writes for a job: `new` in the digits of a baseline, `old` where rounding alone differs."""
    old = old or {}
    same_versions = old.get("metrics", {})
    cells = {}
    for key, row in new["cells"].items():
        before = old.get("cells", {}).get(key, {})
        cells[key] = {
            name: steady(before[name], value)
            if name in before and same_versions.get(name) == new["metrics"].get(name)
            else stored(value)
            for name, value in row.items()
        }
    decisions = {}
    for key, entry in new["decisions"].items():
        before = old.get("decisions", {}).get(key)
        error = stored(entry["error"]) if before is None else steady(before["error"], entry["error"])
        decisions[key] = {**entry, "error": error}
    return {**new, "cells": cells, "decisions": decisions}
