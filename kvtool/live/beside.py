"""Beside: the open-loop replay of the same cells, its columns put beside the measured ones."""

from __future__ import annotations

from collections import defaultdict
from statistics import fmean
from typing import Any

from kvtool.errors import KvtoolError
from kvtool.live.calibration import AVERAGED, ERRORS, calibrate, calibrate_spans, distinct, predictors
from kvtool.live.tables import Entries
from kvtool.replay.plan import Plan
from kvtool.replay.run import replayed
from kvtool.trace import Sequence, Trace

PREDICTED = ("predicted_kl", "predicted_kl_se")
_CELL = ("sequence", "policy", "ratio", "budget", "schedule")


def replay_beside(
    trace: Trace, plan: Plan, work: list[tuple[Sequence, int, int]], tables: Entries, *, same: bool
) -> None:
    """Replay `plan` and fill the open-loop columns of cells, layers, rows and timeline, and the table of agreement.

    Args:
        same: the live run carried out what the trace decides, so the replay must have decided it too.

    Raises:
        KvtoolError: code `internal` where the replay decided otherwise than the live run.
    """
    result = replayed(trace, plan, work)
    decided = {_key(e, "layer", "kv_head"): e["digest"] for e in result.entries("evict_steps")}
    if same and any(decided[_key(e, "layer", "kv_head")] != e["digest"] for e in tables["evict_steps"]):
        raise KvtoolError("internal", "replay and live run decided differently on the same trace")
    cells = result.entries("cells")
    asked = [column for metric in plan.asked for column in metric.columns if column.level == "cell"]
    _fill(
        tables["cells"],
        cells,
        (),
        [
            *predictors(cells[0]),
            "predicted_kl_block",
            "predicted_kl_partial",
            *(column.name for column in asked),
            *(c for c in ERRORS if c not in cells[0]),
        ],
    )
    _average(tables["cells"], result.entries("rows"))
    _fill(tables["layers"], result.entries("layers"), ("layer",), ["layer_error"])
    _fill(tables["rows"], result.entries("rows"), ("layer", "q_head"), ["output_error"])
    _fill_spans(tables["spans"], cells, result.entries("layers"))
    further = [column.name for column in asked if column.direction == "lower"]
    counted = distinct(tables["cells"], tables["evict_steps"])
    tables["calibration"] = [*calibrate(counted, further), *calibrate_spans(counted, tables["spans"])]


def _average(cells: list[dict[str, Any]], rows: list[dict[str, Any]]) -> None:
    """The means of AVERAGED over layers and heads, and over sequences where `sequence` is null."""
    found: dict[tuple, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        for column, of in AVERAGED.items():
            if row["event"] is None and row[of] is not None:
                found[_key(row)][column].append(row[of])
    over: dict[tuple, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for (_, *cell), columns in found.items():
        for column, values in columns.items():
            over[None, *cell][column].append(fmean(values))
    for entry in cells:
        known = (over if entry["sequence"] is None else found)[_key(entry)]
        entry.update({column: fmean(known[column]) if known[column] else None for column in AVERAGED})


def _key(entry: dict[str, Any], *place: str) -> tuple[Any, ...]:
    return tuple(entry[name] for name in (*_CELL, *place))


def _fill_spans(timeline: list[dict[str, Any]], cells: list[dict[str, Any]], layers: list[dict[str, Any]]) -> None:
    """`predicted_kl` of the replay's own spans, where all its layers have the very spans of the table."""
    starts: dict[tuple, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    for layer in layers:
        if layer["event"] is not None:
            starts[_key(layer)][layer["layer"]].add(layer["event"])
    mine: dict[tuple, set[int]] = defaultdict(set)
    for entry in timeline:
        mine[_key(entry)].add(entry["step_from"])
    apart = {key for key, by_layer in starts.items() if any(events != mine[key] for events in by_layer.values())}
    apart |= {(None, *cell) for _, *cell in apart}  # nor is there a mean over sequences
    found = {(*_key(cell), cell["event"]): cell for cell in cells if cell["event"] is not None}
    for entry in timeline:
        key = _key(entry)
        other = None if key in apart else found.get((*key, entry["step_from"]))
        entry.update({name: None if other is None else other.get(name) for name in PREDICTED})


def _fill(
    entries: list[dict[str, Any]], others: list[dict[str, Any]], place: tuple[str, ...], names: list[str]
) -> None:
    found = {_key(other, *place): other for other in others if other.get("event") is None}
    for entry in entries:
        other = found[_key(entry, *place)]
        entry.update({name: other.get(name) for name in names})
