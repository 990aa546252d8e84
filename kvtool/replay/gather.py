"""Gather: from finished units to one result, with everything that needs all layers of a sequence."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import fmean
from typing import Any

from torch import Tensor

from kvtool.manifest import environment
from kvtool.metrics import Metric, PredictedKL, built_in_metrics
from kvtool.replay.coverage import Coverage, over_sequences
from kvtool.replay.notes import sentences
from kvtool.replay.parts import OPTIONAL, TABLES, Part
from kvtool.replay.plan import Plan
from kvtool.replay.unit import METRICS
from kvtool.result import Result, concatenate, table_of, with_columns
from kvtool.trace import Sequence, Trace
from kvtool.words import spans

Work = list[tuple[Sequence, int, int]]  # (sequence, layer id, event step)


def gather(
    trace: Trace,
    plan: Plan,
    work: Work,
    parts: list[Part],
    warnings: list[str],
    covered: Mapping[int, Coverage],
) -> Result:
    """The whole result.

    Args:
        parts: one per entry of `work`, in its order.
        covered: sequence index -> what its gradients speak of.
    """
    evicting = sum(not policy.keeps_all for _, policy in plan.policies)
    warnings = warnings + sentences([note for part in parts for note in part.notes], evicting, len(work))
    by_part = arrow_tables(parts)
    for tables, shares in zip(by_part, _shares(plan, work, parts), strict=True):
        for name in ("layers", "rows"):
            tables[name] = with_columns(tables[name], shares[name])
    whole = {name: concatenate([tables[name] for tables in by_part]) for name in by_part[0]}
    whole["cells"] = table_of("cells", cell_entries(plan, work, parts, covered))
    return Result(manifest_of(trace, plan, work), whole, warnings)


def arrow_tables(parts: list[Part]) -> list[dict[str, Any]]:
    """The tables of every part as Arrow tables, whether it was computed now or read back."""
    return [
        {
            name: table_of(name, p.tables[name]) if isinstance(p.tables[name], list) else p.tables[name]
            for name in (*TABLES, *OPTIONAL)
            if name in p.tables
        }
        for p in parts
    ]


def by_sequence(work: Work) -> dict[int, list[int]]:
    """Sequence index -> where its layers stand in `work`."""
    found: dict[int, list[int]] = {}
    for place, (sequence, _, _) in enumerate(work):
        found.setdefault(sequence.index, []).append(place)
    return found


def _metrics(plan: Plan) -> dict[str, Metric]:
    return {**built_in_metrics(), PredictedKL.name: PredictedKL(plan.kl_windows)}


def _shares(plan: Plan, work: Work, parts: list[Part]) -> list[dict[str, dict[str, list[float | None]]]]:
    """Per part the share columns of its `layers` (one value a cell) and `rows` (one a cell and head)."""
    found: list[dict[str, dict[str, list[float | None]]]] = [{"layers": {}, "rows": {}} for _ in parts]
    for places in by_sequence(work).values():
        for cell in range(len(plan.cells)):
            for name, metric in _metrics(plan).items():
                shares = metric.shares([parts[place].partials[cell][name] for place in places])
                for column, per_layer in shares.items():
                    for place, heads in zip(places, per_layer, strict=True):
                        found[place]["rows"].setdefault(column, []).extend(_defined(heads))
                        found[place]["layers"].setdefault(column, []).extend(_defined(heads.sum()))
    return found


def _defined(values: Tensor) -> list[float | None]:
    return [None if math.isnan(value) else value for value in values.reshape(-1).tolist()]


def cell_entries(plan: Plan, work: Work, parts: list[Part], covered: Mapping[int, Coverage]) -> list[dict[str, Any]]:
    """One entry per cell and sequence, and one with `sequence` null: the mean over sequences."""
    entries = []
    metrics, together = _metrics(plan), over_sequences(covered)
    for index, cell in enumerate(plan.cells):
        key = {**cell.key(plan), "event": None, "oracle": cell.policy.oracle}
        per_sequence: list[dict[str, Any]] = []
        by_metric: dict[str, list[dict[str, Any]]] = {name: [] for name in metrics}
        for sequence, places in by_sequence(work).items():
            partials = [parts[place].partials[index] for place in places]
            values: dict[str, Any] = {}
            for name, metric in metrics.items():
                by_metric[name].append(metric.combine([partial[name] for partial in partials]))
                values |= by_metric[name][-1]
            counted = [partial["counts"] for partial in partials]
            values["achieved"] = fmean(float(c["achieved"]) for c in counted)
            values["candidates"] = fmean(float(c["candidates"]) for c in counted)
            values["ties"] = sum(int(c["ties"]) for c in counted)
            per_sequence.append({"sequence": sequence, **key, **values, **_described(covered[sequence])})
        mean = {"sequence": None, **key}
        for name, metric in metrics.items():
            mean |= metric.average(by_metric[name])
        if together.missing is not None:
            mean |= dict.fromkeys(mean.keys() & by_metric[PredictedKL.name][0].keys())
        mean["achieved"] = fmean(entry["achieved"] for entry in per_sequence)
        mean["candidates"] = fmean(entry["candidates"] for entry in per_sequence)
        mean["ties"] = fmean(entry["ties"] for entry in per_sequence)
        entries += [*per_sequence, {**mean, **_described(together)}]
    return entries


def _described(covered: Coverage) -> dict[str, Any]:
    return {"predicted_kl_block": covered.block, "predicted_kl_partial": covered.label}


def manifest_of(trace: Trace, plan: Plan, work: Work) -> dict[str, Any]:
    """What was replayed, of which trace, with which versions."""
    layer_ids = sorted({layer_id for _, layer_id, _ in work})
    indices = sorted({s.index for s, _, _ in work})
    return {
        "trace": {"path": str(trace.path), "digest": trace.digest},
        "model": trace.manifest["model"].get("name", "unnamed model"),
        "capture": trace.manifest.get("capture"),
        "sequences": {
            "count": len(indices),
            "indices": indices,
            "prompt_lengths": [s.prompt_length for s in trace.sequences if s.index in indices],
            "lengths": [s.length for s in trace.sequences if s.index in indices],
        },
        "layers": {"ids": layer_ids, "text": spans(layer_ids)},
        "replay": plan.describe(),
        "metrics": METRICS,
        "device": "cpu",
        "kernels": "reference (torch)",
        "environment": environment("pyarrow", "zarr"),
    }
