"""Observe: what a baseline holds of one result."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from statistics import fmean
from typing import Any

import numpy as np

from kvtool.check.baseline import LARGEST
from kvtool.check.cuts import packed, rounding_can_turn, same_cuts, short_digest
from kvtool.check.digits import Number, steady, stored
from kvtool.check.judge import Tolerance, changed_number
from kvtool.check.measures import Measure
from kvtool.check.suite import Job
from kvtool.check.undefined import SUFFIX
from kvtool.result import Result


def cell_name(entry: Mapping[str, Any]) -> str:
    """`snapkv @0.5 prompt-end sequence 0`: what was asked and where."""
    asked = entry["budget"] if entry["ratio"] is None else entry["ratio"]
    return f"{entry['policy']} @{asked} {entry['schedule']} sequence {entry['sequence']}"


def observe(job: Job, columns: Mapping[str, Measure], result: Result) -> dict[str, Any]:
    """The entry of a baseline that says what `result` says, with all digits and the cuts of every head that has near
    ties; `merged` makes of it what is written.

    Args:
        columns: what is recorded of every cell.
    """
    replay = result.manifest["replay"]
    asked = _asked(columns, replay["metrics"])
    return {
        "trace": result.manifest["trace"]["digest"],
        "settings": {
            **{key: replay[key] for key in ("evaluate", "precision", "prefix", "sinks", "window")},
            "layers": result.manifest["layers"]["text"],
        },
        "metrics": {name: one.version for name, one in columns.items() if one.asked and one.version is not None},
        **({"asked": asked} if asked else {}),
        "cells": _cells(result, columns),
        "decisions": _decisions(result) if job.decisions else {},
    }


def _asked(columns: Mapping[str, Measure], described: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Metric -> how it was asked for, and what is recorded of it: with other parameters it is another number."""
    found = {}
    for metric in described:
        mine = sorted(name for name, one in columns.items() if one.metric == metric["name"] and one.asked)
        if mine:
            parameters = {name: _plain(value) for name, value in metric["parameters"].items()}
            found[metric["name"]] = {"label": metric["label"], "parameters": parameters, "columns": mine}
    return found


def _plain(value: Any) -> Any:
    """A parameter as JSON that comes back as it was: text for what a baseline holds no number for."""
    if value is None or isinstance(value, bool | str):
        return value
    sound = isinstance(value, float) and math.isfinite(value)
    return value if sound or (isinstance(value, int) and abs(value) <= LARGEST) else repr(value)


def _cells(result: Result, columns: Mapping[str, Measure]) -> dict[str, dict[str, Number]]:
    found: dict[str, dict[str, Number]] = {}
    whole = [one for one in columns.values() if one.table == "cells"]
    for entry in result.entries("cells"):
        if entry["sequence"] is not None and entry["event"] is None:
            found[cell_name(entry)] = {one.name: entry[one.name] for one in whole if one.asked or entry[one.name]}
    for table in ("layers", "rows"):
        names = [one.name for one in columns.values() if one.table == table and one.counts is None]
        parts: dict[str, dict[str, list[Number]]] = {}
        for entry in result.entries(table) if names else ():
            if entry["event"] is None:
                of_cell = parts.setdefault(cell_name(entry), {name: [] for name in names})
                for name in names:
                    of_cell[name].append(entry[name])
        for cell, of_cell in parts.items():
            for name, values in of_cell.items():
                known = [float(value) for value in values if value is not None]
                found[cell][name] = fmean(known) if known else None
                if len(known) < len(values):
                    found[cell][f"{name}{SUFFIX}"] = len(values) - len(known)
    return found


def _decisions(result: Result) -> dict[str, dict[str, Any]]:
    """Per cell and layer the digest of its evict steps, and head by head a short one and what stayed; of heads with
    near ties also the cuts. `error` only serves to say which layers moved where decisions did not."""
    errors = _layer_errors(result)
    found: dict[str, dict[str, Any]] = {}
    for entry in result.entries("evict_steps"):
        key = f"{cell_name(entry)} layer {entry['layer']}"
        empty: dict[str, Any] = {"heads": [], "kept": [], "cuts": {}}
        layer = found.setdefault(key, {"digest": entry["digest"][:20], "error": errors.get(key), **empty})
        steps = np.asarray(entry["evict_step"], dtype="<i4")
        told = (entry[name] for name in ("event_steps", "event_near_ties", "event_ties", "near_rows"))
        cuts = packed(steps, *told)
        if cuts is not None:
            layer["cuts"][str(len(layer["heads"]))] = cuts
        layer["heads"].append(short_digest(steps))
        layer["kept"].append(int((steps == len(steps)).sum()))
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


def merged(
    old: Mapping[str, Any] | None, new: Mapping[str, Any], tolerance_of: Callable[[str], Tolerance]
) -> dict[str, Any]:
    """What an update writes for a job: `new` in the digits of a baseline, `old` where rounding alone differs and the
    tolerance lets it pass."""
    old = old or {}
    cells = {}
    for key, row in new["cells"].items():
        before = old.get("cells", {}).get(key, {})
        cells[key] = {
            name: steady(before[name], value, tolerance_of(name).allows)
            if name in before and changed_number(name, old, new) is None
            else stored(value)
            for name, value in row.items()
        }
    decisions = {}
    for key, entry in new["decisions"].items():
        before = old.get("decisions", {}).get(key, {})
        cuts = {head: one for head, one in entry["cuts"].items() if rounding_can_turn(one)}
        for head, former in before.get("cuts", {}).items():
            if head in cuts and same_cuts(former, cuts[head]):
                cuts[head] = former
        decisions[key] = {
            **{field: value for field, value in entry.items() if field != "cuts"},
            "error": steady(before["error"], entry["error"]) if before else stored(entry["error"]),
            **({"cuts": cuts} if cuts else {}),
        }
    return {**new, "cells": cells, "decisions": decisions}
