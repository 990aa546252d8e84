"""Gather: from finished units to one result, with everything that needs all layers of a sequence."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from kvtool.kernels.device import merged
from kvtool.manifest import environment
from kvtool.metrics import Asked, PredictedKL, in_sequence
from kvtool.replay.coverage import Coverage, Coverages, over_sequences
from kvtool.replay.notes import sentences
from kvtool.replay.parts import OPTIONAL, TABLES, Part, Partial
from kvtool.replay.plan import Plan
from kvtool.replay.timeline import timeline_entries
from kvtool.replay.unit import FLAGS
from kvtool.replay.work import evaluated_from
from kvtool.result import Result, concatenate, table_of, with_columns
from kvtool.trace import Sequence, Trace
from kvtool.words import spans

Work = list[tuple[Sequence, int, int]]  # (sequence, layer id, first evaluated step)


def gather(
    trace: Trace,
    plan: Plan,
    work: Work,
    parts: list[Part],
    warnings: list[str],
    covered: Coverages,
) -> Result:
    """The whole result.

    Args:
        parts: one per entry of `work`, in its order.
        covered: what the gradients of the sequences speak of.
    """
    evicting = sum(not policy.keeps_all for _, policy in plan.policies)
    warnings = warnings + sentences([note for part in parts for note in part.notes], evicting, len(work))
    by_part = [arrow_tables(part) for part in parts]
    for tables, shares in zip(by_part, _shares(plan, work, parts), strict=True):
        for name in ("layers", "rows"):
            tables[name] = with_columns(tables[name], shares[name])
    whole = {name: concatenate([tables[name] for tables in by_part]) for name in by_part[0]}
    if plan.repeats:
        whole["timeline"] = table_of("timeline", _timeline(plan, work, parts))
    whole["cells"] = table_of("cells", cell_entries(plan, work, parts, covered), plan.numbers)
    manifest = manifest_of(trace, plan, work)
    if plan.card is not None:
        manifest["kernels"] = merged(part.kernels for part in parts)
    return Result(manifest, whole, warnings)


def arrow_tables(part: Part) -> dict[str, Any]:
    """The tables of a part as Arrow tables, whether it was computed now or read back."""
    return {
        name: table_of(name, found, part.numbers) if isinstance(found := part.tables[name], list) else found
        for name in (*TABLES, *OPTIONAL)
        if name in part.tables
    }


def by_sequence(work: Work) -> dict[int, list[int]]:
    """Sequence index -> where its layers stand in `work`."""
    found: dict[int, list[int]] = {}
    for place, (sequence, _, _) in enumerate(work):
        found.setdefault(sequence.index, []).append(place)
    return found


def _timeline(plan: Plan, work: Work, parts: list[Part]) -> list[dict[str, Any]]:
    """The table `timeline` of all cells and sequences."""
    entries = []
    for index, cell in enumerate(plan.cells):
        for sequence, places in by_sequence(work).items():
            wholes = [parts[place].partials[index] for place in places]
            achieved = [float(w["counts"]["achieved"]) for w in wholes if not math.isnan(w["counts"]["achieved"])]
            key = {"sequence": sequence, **cell.key(plan), "achieved": fmean(achieved) if achieved else None}
            found = timeline_entries(key, [work[place][1] for place in places], wholes)
            idle = all(bool(whole["counts"]["no_effect"]) for whole in wholes)
            entries += [_without_scores(entry) for entry in found] if idle else found
    return entries


def _shares(plan: Plan, work: Work, parts: list[Part]) -> list[dict[str, dict[str, list[float | None]]]]:
    """Per part the share columns of its `layers` (one value a cell) and `rows` (one a cell and head)."""
    found: list[dict[str, dict[str, list[float | None]]]] = [{"layers": {}, "rows": {}} for _ in parts]
    for sequence, places in by_sequence(work).items():
        for cell in range(len(plan.cells)):
            wholes = [parts[place].partials[cell] for place in places]
            with in_sequence(sequence):
                _share_out(plan, [found[place] for place in places], wholes)
            events = [parts[place].spans[cell] for place in places]
            for event in sorted({event for known in events for event in known}):
                having = [index for index, known in enumerate(events) if event in known]
                into = [found[places[index]] for index in having]
                with in_sequence(sequence):
                    _share_out(plan, into, [events[index][event] for index in having], whole=len(having) == len(places))
    return found


def _share_out(
    plan: Plan, into: list[dict[str, dict[str, list[float | None]]]], partials: list[Partial], whole: bool = True
) -> None:
    """Append the shares of these layers; nothing is known where they are not all of the sequence's (not `whole`)."""
    for name, metric in plan.metrics.items():
        shares = metric.shares([partial[name] for partial in partials])
        if isinstance(metric, Asked):
            metric.expect_heads(shares, [partial["output_error"]["output_error"].numel() for partial in partials])
        for column, per_layer in shares.items():
            for one, heads in zip(into, per_layer, strict=True):
                known = heads if whole else torch.full_like(heads, math.nan)
                one["rows"].setdefault(column, []).extend(_defined(known))
                one["layers"].setdefault(column, []).extend(_defined(known.sum()))


def _defined(values: Tensor) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values.reshape(-1).tolist()]


def cell_entries(plan: Plan, work: Work, parts: list[Part], covered: Coverages) -> list[dict[str, Any]]:
    """One entry per cell and sequence, and one with `sequence` null: the mean over sequences."""
    entries = []
    for index, cell in enumerate(plan.cells):
        key = {**cell.key(plan), "event": None, "oracle": cell.policy.oracle}
        whole: list[CellOf] = []
        spans: dict[int, list[CellOf]] = {}
        begun: dict[int, int] = {}
        for sequence, places in by_sequence(work).items():
            begun[sequence] = evaluated_from(cell.schedule, work[places[0]][0])
            said = _described(covered.since(sequence, begun[sequence]))
            first = {"sequence": sequence, **key}
            whole.append(_combined(plan, first, [parts[place].partials[index] for place in places], said))
            events = [parts[place].spans[index] for place in places]
            # Layers whose events differ (a window keeps them below a high-water mark) have no common span.
            for event in sorted(set.intersection(*(set(one) for one in events))):
                here = {**first, "event": event}
                said = _described(covered.since(sequence, event))
                spans.setdefault(event, []).append(_combined(plan, here, [one[event] for one in events], said))
        of_cell = (*FLAGS, "evaluated_from")  # said of every span of a cell too
        flags = {one.entry["sequence"]: {name: one.entry[name] for name in of_cell} for one in whole}
        found = [one.entry for one in whole]
        together = over_sequences({sequence: covered.since(sequence, step) for sequence, step in begun.items()})
        found.append(_mean(plan, {"sequence": None, **key}, whole, together))
        flags[None] = {name: found[-1][name] for name in of_cell}
        for event, members in sorted(spans.items()):
            found += [one.entry for one in members]
            if len(members) == len(whole):
                together = over_sequences({sequence: covered.since(sequence, event) for sequence in begun})
                found.append(_mean(plan, {"sequence": None, **key, "event": event}, members, together))
        for entry in found:
            entry |= flags[entry["sequence"]]
        asked = [c.name for metric in plan.asked for c in metric.columns if c.level == "cell" and c.direction != "none"]
        entries += [_without_scores(entry, asked) if entry["no_effect"] else entry for entry in found]
    return entries


# Of a cell, means over its layers; the other counts are sums.
COUNTED = ("achieved", "candidates", "events", "evaluated_from")


@dataclass(frozen=True)
class CellOf:
    """The entry of a cell in one sequence, and what every metric said of it."""

    entry: dict[str, Any]
    by_metric: dict[str, dict[str, Any]]


def _combined(plan: Plan, key: dict[str, Any], partials: list[Partial], said: dict[str, Any]) -> CellOf:
    """The layers of one sequence put together."""
    with in_sequence(key["sequence"]):
        by_metric = {n: metric.combine([partial[n] for partial in partials]) for n, metric in plan.metrics.items()}
    entry = dict(key)
    for values in by_metric.values():
        entry |= values
    counted = [partial["counts"] for partial in partials]
    for name in counted[0]:
        numbers = [float(one[name]) for one in counted if not math.isnan(one[name])]
        entry[name] = (fmean(numbers) if numbers else None) if name in COUNTED else int(sum(numbers))
    if "no_effect" in entry:  # a layer in which nothing left has no say in who decided
        entry["no_effect"] = entry["no_effect"] == len(counted)
        idle = sum(bool(one["no_effect"]) for one in counted)
        entry["window_decided"] = 0 < entry["window_decided"] == len(counted) - idle
    return CellOf({**entry, **said}, by_metric)


def _without_scores(entry: dict[str, Any], asked: Iterable[str] = ()) -> dict[str, Any]:
    """The entry of a cell that had no effect: the errors of a full cache are no score of its policy.

    Args:
        asked: cell columns of metrics that were asked for, those with a better and a worse.
    """
    known = ("predicted_kl_block", "predicted_kl_partial", "predicted_kl_steps", "predicted_kl_draws")
    scores = [name for name in entry if name.startswith(("mean_layer_error", "mean_output_error", "predicted_kl"))]
    scores += ["layer_error", "output_error"] if "step_from" in entry else []
    return {**entry, **dict.fromkeys([*(name for name in scores if name not in known), *asked])}


def _mean(plan: Plan, key: dict[str, Any], cells: list[CellOf], together: Coverage) -> dict[str, Any]:
    """The mean over sequences."""
    mean = dict(key)
    for name, metric in plan.metrics.items():
        mean |= metric.average([cell.by_metric[name] for cell in cells])
    if together.missing is not None:
        mean |= dict.fromkeys(mean.keys() & cells[0].by_metric[PredictedKL.name].keys())
    for name in (*COUNTED, "ties", "evicted", "fallbacks", "deadline_fallbacks"):
        known = [cell.entry[name] for cell in cells if cell.entry.get(name) is not None]
        mean[name] = fmean(known) if known else None
    for name in FLAGS:
        if all(name in cell.entry for cell in cells):
            mean[name] = all(cell.entry[name] for cell in cells)
    return {**mean, **_described(together)}


def _described(covered: Coverage) -> dict[str, Any]:
    return {"predicted_kl_block": covered.block, "predicted_kl_partial": covered.label}


def manifest_of(trace: Trace, plan: Plan, work: Work) -> dict[str, Any]:
    """What was replayed, of which trace, with which versions."""
    layer_ids = sorted({layer_id for _, layer_id, _ in work})
    indices = sorted({s.index for s, _, _ in work})
    return {
        "trace": {"path": trace.shown, "digest": trace.digest},
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
        "metrics": plan.versions,
        "device": "cpu" if plan.card is None else plan.card.kind,
        "card": None if plan.card is None else plan.card.name,
        "kernels": "reference (torch)",
        "environment": environment("pyarrow", "zarr"),
    }
