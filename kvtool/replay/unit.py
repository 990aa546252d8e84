"""Unit of work: one layer of one sequence with all cells. Logits are computed once for all of them."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from kvtool.errors import KvtoolError
from kvtool.kernels.attention_mass import attention_mass
from kvtool.kernels.device import using
from kvtool.layer import Layer
from kvtool.metrics import StepErrors, ages, evaluate_cells, landmark_entries, nullable
from kvtool.metrics.cache_size import live_tokens
from kvtool.replay.decide import donor_of, run_schedule
from kvtool.replay.decisions import decision_entries
from kvtool.replay.decompose import Say, decompose_unit
from kvtool.replay.events import event_entries, shown_events
from kvtool.replay.heap import large_blocks_apart, trim
from kvtool.replay.landmarks import about
from kvtool.replay.metric_columns import columns_of, refuse_double, row_entries
from kvtool.replay.notes import note_thinned, note_unit, without_effect
from kvtool.replay.parts import Part, Partial
from kvtool.replay.plan import CONTROLS, Cell, Plan
from kvtool.replay.telemetry import telemetry_entries
from kvtool.replay.timeline import NAME as TIMELINE
from kvtool.replay.timeline import binned, bins
from kvtool.replay.work import evaluated_from
from kvtool.retained import DEADLINE, Event, RetainedSet
from kvtool.schedule import Schedule
from kvtool.trace import Sequence

FLAGS = ("no_effect", "window_decided")  # why the numbers of a cell say nothing of its policy
LONG = 4096  # tokens from which a policy leaves enough free memory behind to be worth giving back
MOST_SPANS = 64  # events of a cell that get entries of their own


def run_unit(sequence: Sequence, layer_id: int, plan: Plan, step: int, say: Say = lambda what: None) -> Part:
    """Decide and measure every cell of the plan on one layer, on the plan's device.

    Args:
        step: the first evaluated one.
        say: told what is being done, where that takes long.
    """
    with using(plan.card, wide=plan.precision == "float64") as running:
        part = _run_unit(sequence, layer_id, plan, step, say)
    return part if running is None else replace(part, kernels=running.log.counts)


def _run_unit(sequence: Sequence, layer_id: int, plan: Plan, step: int, say: Say) -> Part:
    layer = sequence.layer(layer_id, dtype=plan.dtype)
    donor = donor_of(sequence, layer)
    if donor is not layer:
        _refuse_nonsense(donor, sequence.index)
    _refuse_nonsense(layer, sequence.index)
    steps = layer.query_steps[layer.query_steps >= step]
    with large_blocks_apart(layer.tokens >= LONG):
        decided = decide_cells(sequence, layer, plan, step, donor)
    own = donor is layer
    layer = layer.with_queries_of(_asked_still(layer, steps, decided, plan))  # no policy reads the past any more
    donor = layer if own else replace(donor)  # of another's cache the geometry is enough
    if layer.tokens >= LONG:
        trim()
    positions = [cell.policy.positions for cell in plan.cells]
    errors = evaluate_cells(layer, decided, steps, positions, mode=plan.evaluate)
    starts = {schedule: evaluated_from(schedule, sequence) for schedule in plan.schedules}
    once = {starts[schedule] for schedule in plan.schedules if not schedule.repeats}  # only one event has a regret
    masses = {start: _future_mass(layer, steps[steps >= start]) for start in once}
    tables: dict[str, list[dict[str, Any]]] = {"layers": [], "rows": [], "ages": [], "evict_steps": []}
    partials: list[Partial] = []
    spans: list[dict[int, Partial]] = []
    notes, keys = [], []
    landmarks: list[dict[str, Any]] = []
    said = about(sequence)
    for cell, retained, found in zip(plan.cells, decided, errors, strict=True):
        key = {"sequence": sequence.index, **cell.key(plan), **achieved_of(retained), "event": None, "layer": layer_id}
        keys.append(key)
        start = starts[cell.schedule]
        mine = found.between(start, layer.tokens)
        if not cell.schedule.repeats and cell.policy.positions == "original":
            mine = replace(mine, future_mass=masses[start])
        whole = _measure(plan, cell, layer, donor, retained, mine, key, tables)
        counts = {"ties": sum(int(event.ties.sum()) for event in retained.events), **counts_of(retained, layer.tokens)}
        missing = without_effect(cell, retained, donor.geometry)
        counts |= {"no_effect": int(missing is not None), "evaluated_from": start}
        evicting = sum(bool((e.found > e.achieved).any()) for e in retained.events if e.found is not None)
        counts["window_decided"] = int(0 < evicting == counts["fallbacks"])
        flags = {name: bool(counts[name]) for name in FLAGS}
        tables["layers"][-1] |= {**counts, **flags}
        whole["counts"] = _stored({**counts, "achieved": key["achieved"]})
        if plan.repeats:
            whole[TIMELINE] = binned(found, retained, layer.geometry, bins(step, layer.tokens, plan.bin_steps))
        partials.append(whole)
        spans.append({})
        for begin, stop in told_apart(cell.schedule, retained, layer):
            if not bool(((steps >= begin) & (steps < stop)).any()):
                continue
            at = next((event for event in retained.events if event.step == begin), None)
            here = {**key, **achieved_of(RetainedSet(retained.evict_step, [at] if at else [])), "event": begin}
            part = _measure(plan, cell, layer, donor, retained, found.between(begin, stop), here, tables, at)
            counted = {"ties": 0 if at is None else int(at.ties.sum()), **_counts_at(at)}
            tables["layers"][-1] |= {**counted, **flags, "evaluated_from": start}
            part["counts"] = _stored({**counted, "achieved": here["achieved"]})
            spans[-1][begin] = part
        tables["ages"] += _ages(key, retained, donor, plan)
        tables["evict_steps"] += decision_entries(key, retained, donor.geometry)
        notes += note_unit(cell, retained, donor.geometry, sequence.index, layer_id)
        landmarks += [{**key, **said, **entry} for entry in landmark_entries(retained, sequence.landmarks)]
    if any(each.landmarks for each in sequence.trace.sequences):
        tables["landmarks"] = landmarks
    if plan.repeats:
        tables["events"] = event_entries(keys, plan.cells, layer, donor.geometry, decided, errors)
        tables["cache"] = [
            entry for key, retained in zip(keys, decided, strict=True) for entry in _cache(key, retained, layer, steps)
        ]
        notes += note_thinned(decided, sequence.index, layer_id)
    if plan.telemetry:
        pairs = zip(keys, decided, strict=True)
        tables["telemetry"] = [entry for key, retained in pairs for entry in telemetry_entries(key, retained)]
    if plan.decompose is not None:
        wide = plan.calibrated(sequence.layer(layer_id, dtype=torch.float64))
        wide_donor = wide if donor is layer else plan.calibrated(donor_of(sequence, wide))
        tables |= decompose_unit(sequence.index, wide, wide_donor, plan, step, decided, say)
    diagnosed = {name: None for retained in decided for event in retained.events for name in event.diagnostics}
    return Part(tables, partials, notes, spans, (*plan.numbers, *diagnosed))


def _asked_still(layer: Layer, steps: Tensor, decided: list[RetainedSet], plan: Plan) -> Tensor:
    """The steps whose queries are needed once every cell is decided: those evaluated, and where events are described,
    the stored ones right before them, of which the first lies in the prompt."""
    if not plan.repeats:
        return steps
    before = {event.step - 1 for events in shown_events(decided) for event in events}
    wanted = torch.tensor(sorted(before | set(steps.tolist())), dtype=steps.dtype)
    return wanted[torch.isin(wanted, layer.query_steps)]


def told_apart(schedule: Schedule, retained: RetainedSet, layer: Layer) -> list[tuple[int, int]]:
    """The spans of steps between events that get entries of their own; none with one event, or with very many.

    A schedule that goes by the clock alone has the same spans in every layer and for every policy, whether it
    evicted there or not.
    """
    if not schedule.repeats:
        return []
    events = schedule.planned(layer.prompt_length, layer.tokens)
    if events is None:
        events = [event.step for event in retained.events]
    if len(events) > MOST_SPANS:
        return []
    return list(itertools.pairwise([*events, layer.tokens]))


def _measure(
    plan: Plan,
    cell: Cell,
    layer: Layer,
    donor: Layer,
    retained: RetainedSet,
    found: StepErrors,
    key: dict[str, Any],
    tables: dict[str, list[dict[str, Any]]],
    event: Event | None = None,
) -> Partial:
    """Every metric of these steps: entries into `layers` and `rows`, and what is stored of them.

    Args:
        event: whose diagnostics stand beside the rows; the first one where it is the only one.
    """
    metrics = plan.metrics
    partial = {name: metric.partial(found, layer.geometry, retained) for name, metric in metrics.items()}
    heads, alone = columns_of(metrics, partial)
    block = None if found.gradients is None else found.gradients.block
    heads |= {"predicted_kl_block": [block] * layer.geometry.query_heads}
    empty = [None] * layer.geometry.query_heads
    heads |= {"rho": empty, "jitter": empty, "fallback": empty}  # one schema, whichever policies ran
    if event is None and not cell.schedule.repeats:
        (event,) = retained.events
    if donor is layer and event is not None:  # a donor's diagnostics speak of the donor's query heads
        refuse_double(plan, cell, event)
        heads |= {name: nullable(values) for name, values in event.diagnostics.items()}
    tables["layers"].append({**key, **alone, "predicted_kl_block": block})
    tables["rows"] += row_entries(key, layer, heads)
    return partial


def achieved_of(retained: RetainedSet) -> dict[str, float | None]:
    """Tokens that the smallest KV head kept, mean over events; None where none ran."""
    kept = [float(event.achieved.min()) for event in retained.events]
    return {"achieved": fmean(kept) if kept else None}


def counts_of(retained: RetainedSet, tokens: int) -> dict[str, float]:
    """How many events there were, the candidates they had on average, and how often the window decided instead."""
    found = [float(event.found.max()) for event in retained.events if event.found is not None]
    instead = [event.fallback for event in retained.events if event.fallback is not None]
    return {
        "candidates": fmean(found) if found else math.nan,
        "events": len(retained.events),
        "evicted": int((retained.evict_step < tokens).sum()),
        "fallbacks": sum(int((one > 0).any()) for one in instead),
        "deadline_fallbacks": sum(int((one == DEADLINE).any()) for one in instead),
    }


def _stored(counts: dict[str, Any]) -> dict[str, Tensor]:
    known = {name: math.nan if value is None else float(value) for name, value in counts.items()}
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in known.items()}


def _counts_at(event: Event | None) -> dict[str, float | None]:
    alone = RetainedSet(torch.empty(0, 0), [event] if event else [])
    evicted = None if event is None or event.found is None else int((event.found - event.achieved).sum())
    return {**counts_of(alone, 0), "evicted": evicted}


def decide_cells(
    sequence: Sequence, layer: Layer, plan: Plan, step: int, donor: Layer | None = None
) -> list[RetainedSet]:
    """The retained set of every cell of the plan, in order.

    A layer that reads another's keys and values inherits that layer's decisions: the token is in
    one cache only, and the donor's queries scored it.

    Args:
        donor: that layer, where it is at hand.
    """
    donor = plan.calibrated(donor or donor_of(sequence, layer))
    ahead = donor.query_steps[donor.query_steps >= step]
    decided: list[RetainedSet] = []
    shared: dict[Any, Any] = {}  # dropped with the unit
    for label, policy in plan.policies:
        for schedule in plan.schedules:
            rules = plan.rules(schedule, control=label in CONTROLS)
            decided += run_schedule(donor, label, policy, plan.budgets, rules, ahead, shared=shared)
        if donor.tokens >= LONG:
            trim()
    return decided


def _refuse_nonsense(layer: Layer, sequence: int) -> None:
    """NaN and infinities are the trace's fault; found later they would be blamed on a policy."""
    arrays = {"queries": layer.queries, "keys": layer.keys, "values": layer.values}
    if layer.output_projection is not None:
        arrays["output_projection"] = layer.output_projection
    if layer.geometry.sink_logits is not None:
        arrays["sink_logits"] = layer.geometry.sink_logits
    for name, array in arrays.items():
        if not all(bool(torch.isfinite(part).all()) for part in array):  # of all at once: a copy of the whole
            raise KvtoolError(
                "not-finite",
                f"{name} of sequence {sequence}, layer {layer.geometry.layer} hold NaN or infinity",
                "kvtool inspect --verify says whether the trace is damaged",
            )


def _future_mass(layer: Layer, steps: Tensor) -> Tensor:
    """[Hk, T] attention that each row gets from the evaluated steps, summed over the group's query heads."""
    geometry = layer.geometry
    rows = torch.arange(layer.tokens)
    mass: Tensor = attention_mass(
        layer.queries[:, torch.searchsorted(layer.query_steps, steps)],
        layer.keys,
        steps=steps,
        rows=rows,
        first_visible=geometry.first_visible(steps),
        scale=geometry.scale,
        softcap=geometry.softcap,
        sink_logits=geometry.sink_logits,
    )
    return mass.view(geometry.kv_heads, geometry.group, -1).sum(1)


def _ages(key: dict[str, Any], retained: RetainedSet, layer: Layer, plan: Plan) -> list[dict[str, Any]]:
    found = ages(
        retained,
        layer.geometry,
        prompt_length=layer.prompt_length,
        sinks=plan.protection.sinks,
        window=plan.protection.window,
    )
    return [{**key, **entry} for entry in found]


def _cache(key: dict[str, Any], retained: RetainedSet, layer: Layer, steps: Tensor) -> list[dict[str, Any]]:
    """What every evaluated query finds in the cache, per KV head."""
    found = live_tokens(retained.evict_step, layer.geometry)[:, steps].tolist()
    return [
        {**key, "kv_head": head, "steps": steps.tolist(), "cache_tokens": tokens} for head, tokens in enumerate(found)
    ]
