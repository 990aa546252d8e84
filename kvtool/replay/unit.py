"""Unit of work: one layer of one sequence with all cells. Logits are computed once for all of them."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvtool.errors import KvtoolError
from kvtool.kernels.attention_mass import attention_mass
from kvtool.kernels.device import using
from kvtool.kernels.retained_attention.errors import Which
from kvtool.layer import Layer
from kvtool.metrics import ages_of_cells, evaluate_cells, landmark_entries, nullable
from kvtool.metrics.cache_size import live_tokens
from kvtool.metrics.step_errors import all_finite
from kvtool.replay.counts import achieved_of, counts_at, counts_of, evicted_of, stored, window_decided
from kvtool.replay.decide import donor_of, run_schedule
from kvtool.replay.decisions import decision_entries
from kvtool.replay.decompose import Say, decompose_unit
from kvtool.replay.events import event_entries, shown_events
from kvtool.replay.heap import large_blocks_apart, trim
from kvtool.replay.landmarks import about
from kvtool.replay.measured import measured_alike, measured_cells
from kvtool.replay.metric_columns import refuse_double, row_entries
from kvtool.replay.notes import note_thinned, note_unit, without_effect
from kvtool.replay.parts import Part, Partial
from kvtool.replay.plan import CONTROLS, Cell, Plan
from kvtool.replay.telemetry import telemetry_entries
from kvtool.replay.timeline import NAME as TIMELINE
from kvtool.replay.timeline import binned, bins
from kvtool.replay.work import evaluated_from
from kvtool.retained import Event, RetainedSet
from kvtool.schedule import Schedule
from kvtool.trace import Sequence

FLAGS = ("no_effect", "window_decided")  # why the numbers of a cell say nothing of its policy
LONG = 4096  # tokens from which a policy leaves enough free memory behind to be worth giving back
MOST_SPANS = 64  # events of a cell that get entries of their own


def run_unit(
    sequence: Sequence,
    layer_id: int,
    plan: Plan,
    step: int,
    say: Say = lambda what: None,
    which: Which = "all",
) -> Part:
    """Decide and measure every cell of the plan on one layer, on the plan's device.

    Args:
        step: the first evaluated one.
        say: told what is being done, where that takes long.
        which: `errors` leaves out masses, gaps, cosines and regret: their columns are null, and the rest costs less.
    """
    with using(plan.card, wide=plan.precision == "float64") as running:
        part = _run_unit(sequence, layer_id, plan, step, say, which)
    return part if running is None else replace(part, kernels=running.log.counts)


def _run_unit(sequence: Sequence, layer_id: int, plan: Plan, step: int, say: Say, which: Which) -> Part:
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
    labels = [label for label, _ in plan.policies]
    # What a policy's numbers are to the last digit, no other policy of the run may decide: runs are compared by bits.
    groups = [labels.index(cell.label) for cell in plan.cells] if which == "all" else None
    errors = evaluate_cells(layer, decided, steps, positions, mode=plan.evaluate, which=which, groups=groups)
    starts = {schedule: evaluated_from(schedule, sequence) for schedule in plan.schedules}
    once = {starts[schedule] for schedule in plan.schedules if not schedule.repeats}  # only one event has a regret
    masses = {start: _future_mass(layer, steps[steps >= start]) for start in once if which == "all"}
    tables: dict[str, list[dict[str, Any]]] = {"layers": [], "rows": [], "ages": [], "evict_steps": []}
    partials: list[Partial] = []
    spans: list[dict[int, Partial]] = []
    notes, keys = [], []
    landmarks: list[dict[str, Any]] = []
    said = about(sequence)
    evicted = evicted_of(decided)
    measured = measured_cells(plan, layer, decided, errors, starts, masses)
    each = zip(plan.cells, decided, errors, evicted, measured, _ages(decided, donor, plan), strict=True)
    for cell, retained, found, left, (whole, columns), old in each:
        key = {"sequence": sequence.index, **cell.key(plan), **achieved_of(retained), "event": None, "layer": layer_id}
        keys.append(key)
        start = starts[cell.schedule]
        only = None if cell.schedule.repeats else retained.events[0]
        _enter(plan, cell, layer, donor, columns, key, tables, only)
        counts = {"ties": sum(sum(event.ties.tolist()) for event in retained.events)}
        counts |= counts_of(retained, layer.tokens, left)
        missing = without_effect(cell, retained, donor.geometry, left)
        counts |= {"no_effect": int(missing is not None), "evaluated_from": start}
        counts["window_decided"] = int(window_decided(retained, counts["fallbacks"]))
        flags = {name: bool(counts[name]) for name in FLAGS}
        tables["layers"][-1] |= {**counts, **flags}
        whole["counts"] = stored({**counts, "achieved": key["achieved"]})
        if plan.repeats:
            whole[TIMELINE] = binned(found, retained, layer.geometry, bins(step, layer.tokens, plan.bin_steps))
        partials.append(whole)
        spans.append({})
        for begin, stop in told_apart(cell.schedule, retained, layer):
            if not bool(((steps >= begin) & (steps < stop)).any()):
                continue
            at = next((event for event in retained.events if event.step == begin), None)
            here = {**key, **achieved_of(RetainedSet(retained.evict_step, [at] if at else [])), "event": begin}
            ((part, columns),) = measured_alike(plan, layer, [retained], [found.between(begin, stop)])
            _enter(plan, cell, layer, donor, columns, here, tables, at)
            counted = {"ties": 0 if at is None else int(at.ties.sum()), **counts_at(at)}
            tables["layers"][-1] |= {**counted, **flags, "evaluated_from": start}
            part["counts"] = stored({**counted, "achieved": here["achieved"]})
            spans[-1][begin] = part
        tables["ages"] += [{**key, **entry} for entry in old]
        tables["evict_steps"] += decision_entries(key, retained, donor.geometry)
        notes += note_unit(cell, retained, missing, sequence.index, layer_id)
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


def _enter(
    plan: Plan,
    cell: Cell,
    layer: Layer,
    donor: Layer,
    columns: tuple[dict[str, list[Any]], dict[str, Any]],
    key: dict[str, Any],
    tables: dict[str, list[dict[str, Any]]],
    event: Event | None,
) -> None:
    """Entries into `layers` and `rows`.

    Args:
        columns: of heads [H] and of the layer, as `measured_cells` has them.
        event: whose diagnostics stand beside the rows.
    """
    heads, alone = columns
    if donor is layer and event is not None:  # a donor's diagnostics speak of the donor's query heads
        refuse_double(plan, cell, event)
        heads = heads | {name: nullable(values) for name, values in event.diagnostics.items()}
    tables["layers"].append({**key, **alone})
    tables["rows"] += row_entries(key, layer, heads)


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
        if not all_finite(array):
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


def _ages(decided: list[RetainedSet], layer: Layer, plan: Plan) -> list[list[dict[str, Any]]]:
    return ages_of_cells(
        decided,
        layer.geometry,
        prompt_length=layer.prompt_length,
        sinks=plan.protection.sinks,
        window=plan.protection.window,
    )


def _cache(key: dict[str, Any], retained: RetainedSet, layer: Layer, steps: Tensor) -> list[dict[str, Any]]:
    """What every evaluated query finds in the cache, per KV head."""
    found = live_tokens(retained.evict_step, layer.geometry)[:, steps].tolist()
    return [
        {**key, "kv_head": head, "steps": steps.tolist(), "cache_tokens": tokens} for head, tokens in enumerate(found)
    ]
