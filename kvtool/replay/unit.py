"""Unit of work: one layer of one sequence with all cells. Logits are computed once for all of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvtool.errors import KvtoolError
from kvtool.kernels.attention_mass.reference import attention_mass
from kvtool.layer import Layer
from kvtool.metrics import BUILT_IN, ages, built_in_metrics, evaluate_layer, nullable
from kvtool.replay.decide import decide, donor_of
from kvtool.replay.decompose import Say, decompose_unit
from kvtool.replay.notes import note_unit
from kvtool.replay.parts import Part, Partials
from kvtool.replay.plan import Plan
from kvtool.retained import RetainedSet
from kvtool.trace import Sequence

METRICS: dict[str, int] = {name: built_in_metrics()[name].version for name in BUILT_IN}


def run_unit(sequence: Sequence, layer_id: int, plan: Plan, step: int, say: Say = lambda what: None) -> Part:
    """Decide and measure every cell of the plan on one layer, with one event before query `step`.

    Args:
        say: told what is being done, where that takes long.
    """
    layer = sequence.layer(layer_id, dtype=plan.dtype)
    donor = donor_of(sequence, layer)
    for each in {id(donor): donor, id(layer): layer}.values():
        _refuse_nonsense(each, sequence.index)
    steps = layer.query_steps[layer.query_steps >= step]
    decided = decide_cells(sequence, layer, plan, step)
    errors = evaluate_layer(layer, decided, steps, mode=plan.evaluate, future_mass=_future_mass(layer, steps))
    tables: dict[str, list[dict[str, Any]]] = {"layers": [], "rows": [], "ages": [], "evict_steps": []}
    partials: Partials = []
    notes = []
    for cell, retained, found in zip(plan.cells, decided, errors, strict=True):
        event = retained.events[0]
        kept, count = int(event.achieved.min()), int(event.candidates.shape[-1])
        key = {"sequence": sequence.index, **cell.key(plan), "achieved": kept, "event": None, "layer": layer_id}
        partial = {name: metric.partial(found, layer.geometry, retained) for name, metric in built_in_metrics().items()}
        heads, alone = _columns(partial)
        block = None if found.gradients is None else found.gradients.block
        heads |= {"predicted_kl_block": [block] * layer.geometry.query_heads}
        empty = [None] * layer.geometry.query_heads
        heads |= {"rho": empty, "jitter": empty, "fallback": empty}  # one schema, whichever policies ran
        if donor is layer:  # a donor's diagnostics speak of the donor's query heads
            heads |= {name: nullable(values) for name, values in event.diagnostics.items()}
        counted = {"candidates": count, "ties": int(event.ties.sum())}
        tables["layers"].append({**key, **alone, "predicted_kl_block": block, **counted})
        tables["rows"] += _rows(key, layer, heads)
        tables["ages"] += _ages(key, retained, donor, plan)
        tables["evict_steps"] += decision_entries(key, retained)
        partials.append({**partial, "counts": {n: torch.tensor(v) for n, v in {**counted, "achieved": kept}.items()}})
        notes += note_unit(cell, retained, donor.geometry, sequence.index, layer_id)
    if plan.decompose is not None:
        wide = plan.calibrated(sequence.layer(layer_id, dtype=torch.float64))
        wide_donor = wide if donor is layer else plan.calibrated(donor_of(sequence, wide))
        tables |= decompose_unit(sequence.index, wide, wide_donor, plan, step, decided, say)
    return Part(tables, partials, notes)


def decide_cells(sequence: Sequence, layer: Layer, plan: Plan, step: int) -> list[RetainedSet]:
    """The retained set of every cell of the plan, in order.

    A layer that reads another's keys and values inherits that layer's decisions: the token is in
    one cache only, and the donor's queries scored it.
    """
    donor = plan.calibrated(donor_of(sequence, layer))
    ahead = donor.query_steps[donor.query_steps >= step]
    decided: list[RetainedSet] = []
    for label, policy in plan.policies:
        decided += decide(donor, label, policy, plan.budgets, step, plan.protection, ahead)
    return decided


def _refuse_nonsense(layer: Layer, sequence: int) -> None:
    """NaN and infinities are the trace's fault; found later they would be blamed on a policy."""
    arrays = {"queries": layer.queries, "keys": layer.keys, "values": layer.values}
    if layer.output_projection is not None:
        arrays["output_projection"] = layer.output_projection
    if layer.geometry.sink_logits is not None:
        arrays["sink_logits"] = layer.geometry.sink_logits
    for name, array in arrays.items():
        if not bool(torch.isfinite(array).all()):
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


def _columns(partial: dict[str, dict[str, Tensor]]) -> tuple[dict[str, list[Any]], dict[str, Any]]:
    """Head columns [H] and layer columns of all metrics, NaN as None; shares come once all layers are there."""
    heads: dict[str, list[Any]] = {}
    alone: dict[str, Any] = {}
    for name, metric in built_in_metrics().items():
        for column in metric.columns:
            if column.share:
                continue
            if column.level == "head":
                heads[column.name] = nullable(partial[name][column.name])
            elif column.level == "layer":
                alone[column.name] = nullable(partial[name][column.name])[0]
    return heads, alone


def _rows(key: dict[str, Any], layer: Layer, heads: dict[str, list[Any]]) -> list[dict[str, Any]]:
    group = layer.geometry.group
    return [
        {**key, "kv_head": head // group, "q_head": head, **{name: values[head] for name, values in heads.items()}}
        for head in range(layer.geometry.query_heads)
    ]


def _ages(key: dict[str, Any], retained: RetainedSet, layer: Layer, plan: Plan) -> list[dict[str, Any]]:
    found = ages(
        retained,
        layer.geometry,
        prompt_length=layer.prompt_length,
        sinks=plan.protection.sinks,
        window=plan.protection.window,
    )
    return [{**key, **entry} for entry in found]


def decision_entries(key: dict[str, Any], retained: RetainedSet) -> list[dict[str, Any]]:
    """One entry of the table `evict_steps` per KV head."""
    (event,) = retained.events
    digest = retained.digest()
    return [
        {
            **key,
            "event": event.step,
            "achieved": int(event.achieved[head]),
            "kv_head": head,
            "digest": digest,
            "ties": int(event.ties[head]),
            "margin": float(event.margin[head]),
            "evict_step": retained.evict_step[head].tolist(),
        }
        for head in range(retained.evict_step.shape[0])
    ]
