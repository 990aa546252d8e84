"""Beside: the open-loop replay of the same cells, its columns put beside the measured ones."""

from __future__ import annotations

from collections import defaultdict
from statistics import fmean
from typing import Any

from kvtool.errors import KvtoolError
from kvtool.live.calibration import AVERAGED, ERRORS, calibrate, distinct, predictors
from kvtool.live.tables import Entries
from kvtool.replay.plan import Plan
from kvtool.replay.run import replay
from kvtool.trace import Sequence, Trace

_CELL = ("sequence", "policy", "ratio", "budget", "schedule")


def replay_beside(trace: Trace, plan: Plan, work: list[tuple[Sequence, int, int]], tables: Entries) -> None:
    """Replay `plan` and fill the open-loop columns of cells, layers and rows, and the table of agreement.

    Raises:
        KvtoolError: code `internal` where the replay decided otherwise than the live run.
    """
    result = replay(
        trace,
        [label for label, _ in plan.policies],
        ratios=[budget.ratio for budget in plan.budgets if budget.ratio is not None],
        budgets=[budget.tokens for budget in plan.budgets if budget.tokens is not None],
        schedules=[str(schedule) for schedule in plan.schedules],
        prefix=plan.prefix,
        sinks=plan.protection.sinks,
        window=plan.protection.window,
        layers=sorted({layer for _, layer, _ in work}),
        sequences=sorted({sequence.index for sequence, _, _ in work}),
        precision=plan.precision,
        kl_windows=plan.kl_windows,
    )
    decided = {_key(e, "layer", "kv_head"): e["digest"] for e in result.entries("evict_steps")}
    if any(decided[_key(e, "layer", "kv_head")] != e["digest"] for e in tables["evict_steps"]):
        raise KvtoolError("internal", "replay and live run decided differently on the same trace")
    cells = result.entries("cells")
    _fill(
        tables["cells"],
        cells,
        (),
        [
            *predictors(cells[0]),
            "predicted_kl_block",
            "predicted_kl_partial",
            *(c for c in ERRORS if c not in cells[0]),
        ],
    )
    _average(tables["cells"], result.entries("rows"))
    _fill(tables["layers"], result.entries("layers"), ("layer",), ["layer_error"])
    _fill(tables["rows"], result.entries("rows"), ("layer", "q_head"), ["output_error"])
    tables["calibration"] = calibrate(distinct(tables["cells"], tables["evict_steps"]))


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


def _fill(
    entries: list[dict[str, Any]], others: list[dict[str, Any]], place: tuple[str, ...], names: list[str]
) -> None:
    found = {_key(other, *place): other for other in others if other.get("event") is None}
    for entry in entries:
        other = found[_key(entry, *place)]
        entry.update({name: other.get(name) for name in names})
