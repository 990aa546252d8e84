"""Decompose: the tables of `--decompose` for one layer of one sequence, every cell, query head by query head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvtool.decomposition import Centre, KVHead, centre_of_layer
from kvtool.decomposition.objective_capacity import objective_capacity
from kvtool.errors import KvtoolError
from kvtool.layer import Layer
from kvtool.metrics import nullable
from kvtool.policies import Policy
from kvtool.policies.objective import Objective
from kvtool.replay.ask import blaming, sheltering
from kvtool.replay.plan import Plan
from kvtool.replay.sub_caches import Choice, choices, drawn, ladder_entries
from kvtool.retained import Event, RetainedSet
from kvtool.view import View

Say = Callable[[str], None]


def decompose_unit(
    sequence: int, layer: Layer, donor: Layer, plan: Plan, step: int, decided: list[RetainedSet], say: Say
) -> dict[str, list[dict[str, Any]]]:
    """Entries of the tables `decomposition` and, with samples, `ladder`.

    The pool is frozen: the queries see the event's candidates, or what was kept of them, and nothing newer.

    Args:
        layer, donor: in float64; the donor is whose cache the layer reads, usually the layer itself.
        decided: one retained set per cell of the plan.
        say: told what is being done.

    Raises:
        KvtoolError: `usage` for several events; what a policy does wrong.
    """
    asked = plan.decompose
    assert asked is not None
    if any(len(retained.events) != 1 for retained in decided):
        raise KvtoolError("usage", "--decompose speaks of one event, and this run has several")
    ahead = layer.query_steps[layer.query_steps >= step]
    steps = ahead[: asked.horizon]
    event = decided[0].events[0]
    fallback: list[Centre] = []
    centres: dict[str, Centre] = {}
    objectives: dict[str, Objective | None] = {}
    for label, policy in plan.policies:
        view = view_of(layer, event, ahead if policy.oracle else None)
        own = own_centre(label, policy, layer, view)
        if own is None and not fallback:
            fallback.append(centre_of_layer(layer, step, steps, asked))
        centres[label] = own or fallback[0]
        objectives[label] = own_objective(label, policy, layer, view) if donor is layer else None
    plain = view_of(layer, event, None)
    small = drawn(plain, asked, plan.protection) if asked.samples else None
    chosen: dict[str, list[Choice]] = {}
    if small is not None:
        for label, policy in plan.policies:
            if not policy.skips(donor.geometry):
                say(f"calling {label} on sub-caches")
                view = view_of(donor, event, donor.query_steps[donor.query_steps >= step] if policy.oracle else None)
                with sheltering(label, policy, donor):
                    chosen[label] = choices(label, policy, donor, view, small, asked.keep)
    key = {"sequence": sequence, "schedule": str(plan.schedules[0]), "evaluate": plan.evaluate, "event": step}
    key["layer"] = layer.geometry.layer
    group = layer.geometry.group
    rows: list[list[dict[str, Any]]] = [[] for _ in plan.cells]
    ladder: list[dict[str, Any]] = []
    for kv_head in range(layer.geometry.kv_heads):
        head = KVHead.of(layer, plain, kv_head, steps, asked)
        heads = slice(kv_head * group, (kv_head + 1) * group)
        for index, (cell, retained) in enumerate(zip(plan.cells, decided, strict=True)):
            say(f"decomposing KV head {kv_head}, cell {index + 1} of {len(plan.cells)}")
            kept = retained.evict_step[kv_head, head.rows] > step
            centre, objective = centres[cell.label], objectives[cell.label]
            columns = dict(head.columns(kept, centre.mean[heads], centre.covariance[heads]))
            columns["capacity_objective"] = objective_capacity(objective, heads, kept)
            named = {**key, **cell.key(plan), "achieved": int(retained.events[0].achieved[kv_head])}
            rows[index] += _entries(named, kv_head, head, kept, centre, columns)
        if small is not None:
            ladder += ladder_entries(plan, layer, kv_head, head, small, chosen, centres, key, say)
    found = {"decomposition": [entry for of_cell in rows for entry in of_cell]}
    return {**found, "ladder": ladder} if asked.samples else found


def view_of(layer: Layer, event: Event, ahead: Tensor | None) -> View:
    """What `layer` shows of the event; `ahead` for oracles."""
    assert event.candidates is not None
    tokens = event.candidates.expand(layer.geometry.kv_heads, -1)
    return View(layer, event.step, tokens, event.step, torch.full_like(tokens, layer.tokens), ahead)


def own_centre(label: str, policy: Policy, layer: Layer, view: View) -> Centre | None:
    """The policy's own centre, None where it expects no queries or leaves the layer alone."""
    if policy.skips(layer.geometry):
        return None
    with sheltering(label, policy, layer), blaming(label, policy, layer, view):
        found = policy.query_statistics(view)
    return None if found is None else Centre.of_policy(found, layer)


def own_objective(label: str, policy: Policy, layer: Layer, view: View) -> Objective | None:
    """What the policy means to maximise over the candidates."""
    if policy.skips(layer.geometry):
        return None
    with sheltering(label, policy, layer), blaming(label, policy, layer, view):
        return policy.objective(view)


def _entries(
    key: dict[str, Any], kv_head: int, head: KVHead, kept: Tensor, centre: Centre, columns: dict[str, Tensor]
) -> list[dict[str, Any]]:
    """One entry per query head of the KV head, each starting with `key`."""
    said = {
        "center": centre.source,
        "covariance": centre.shape,
        "queries": head.queries.shape[1],
        "pool": head.rows.numel(),
        "kept": int(kept.sum()),
    }
    group = head.queries.shape[0]
    values: dict[str, list[Any]] = {name: nullable(column) for name, column in columns.items()}
    for name in values:
        if name.startswith("capacity_mc_saturated"):
            values[name] = [None if value is None else bool(value) for value in values[name]]
    return [
        {
            **key,
            "kv_head": kv_head,
            "q_head": kv_head * group + index,
            **said,
            **{name: column[index] for name, column in values.items()},
        }
        for index in range(group)
    ]
