"""Evaluate: every cell of one layer at the evaluated steps, in one pass over its queries, keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from kvtool.errors import KvtoolError
from kvtool.kernels.device import on_cpu
from kvtool.kernels.retained_attention import cell_errors
from kvtool.kernels.retained_attention.errors import Which, serves
from kvtool.kernels.retained_attention.reference import retained_attention
from kvtool.layer import Layer
from kvtool.metrics.step_errors import StepErrors, all_finite, from_norms, measure
from kvtool.retained import RetainedSet

Evaluate = Literal["live", "pool"]


def evaluate_layer(
    layer: Layer,
    retained: list[RetainedSet],
    steps: Tensor,
    *,
    mode: Evaluate = "live",
    future_mass: Tensor | None = None,
    which: Which = "all",
    groups: Sequence[int] | None = None,
    block: int | None = None,
) -> list[StepErrors]:
    """Every cell of one layer, in one pass over its queries, keys and values.

    Args:
        retained: one retained set per cell.
        steps: [n] int64 steps to evaluate, each with a stored query.
        mode: `live`, every step sees its live set, new tokens included; `pool`, every step sees the
            candidates of the one event, all of them, and nothing else.
        future_mass: [Hk, T] as in `StepErrors`.
        groups: [C], cells whose last digits may depend on each other, such as those of one policy; None is all.
        which: `errors` leaves mass, gap and cosine NaN, and the rest costs less; see `cell_errors`.

    Gradients belong to what the model saw, so `pool` has no `gradient_dot`.

    Raises:
        KvtoolError: `trace-lacks` for a step without a query, `not-finite` for NaN in the trace,
            `usage` for `pool` with several events or cells whose candidates differ.
    """
    geometry = layer.geometry
    found = query_places(layer, steps)
    rows = torch.arange(layer.tokens)
    first_visible = geometry.first_visible(steps)
    if mode == "pool":
        rows, first_visible = _pool(retained), torch.zeros_like(steps)
    whole = rows.numel() == layer.tokens
    queries = layer.queries[:, found]
    keys, values = (layer.keys, layer.values) if whole else (layer.keys[:, rows], layer.values[:, rows])
    of = [0] * len(retained) if groups is None else list(groups)
    places, different = _different(retained, of)
    evict_steps = torch.stack([r.evict_step if whole else r.evict_step[:, rows] for r in different])
    gradients, rows_of_steps, drawn = gradients_at(layer, steps) if mode == "live" else (None, None, 0)
    attention: dict[str, Any] = {
        "steps": steps,
        "rows": rows,
        "first_visible": first_visible,
        "scale": geometry.scale,
        "softcap": geometry.softcap,
        "sink_logits": geometry.sink_logits,
        "block": block,
    }
    if serves(values):
        norms = cell_errors(
            queries,
            keys,
            values,
            evict_steps,
            projection=layer.output_projection,
            gradients=gradients,
            gradient_rows=rows_of_steps,
            which=which,
            groups=[of[places.index(place)] for place in range(len(different))],
            **attention,
        )
        found_errors = from_norms(norms, steps, future_mass, gradient_rows=rows_of_steps, layer=geometry.layer)
    else:
        on_cpu("retained_attention", "the values of a layer differ so much in size that their squares leave the dtype")
        found_errors = measure(
            retained_attention(queries, keys, values, evict_steps, **attention),
            steps,
            len(different),
            projection=layer.output_projection,
            future_mass=future_mass,
            layer=geometry.layer,
            output_gradients=gradients,
            gradient_rows=rows_of_steps,
        )
    if gradients is not None:
        found_errors = [replace(errors, gradients=layer.gradients, drawn_steps=drawn) for errors in found_errors]
    return [found_errors[place] for place in places]


def _different(retained: list[RetainedSet], groups: list[int]) -> tuple[list[int], list[RetainedSet]]:
    """The retained sets that differ in a group, and for every cell which of them is its own: a control that keeps
    everything does so at every budget."""
    known: dict[tuple[int, bytes], int] = {}
    places: list[int] = []
    different: list[RetainedSet] = []
    for one, group in zip(retained, groups, strict=True):
        decided = group, one.evict_step.contiguous().numpy().tobytes()
        if decided not in known:
            known[decided] = len(different)
            different.append(one)
        places.append(known[decided])
    return places, different


def query_places(layer: Layer, steps: Tensor) -> Tensor:
    """[n] where the queries of `steps` [n] lie in the layer's queries.

    Raises:
        KvtoolError: code `trace-lacks`.
    """
    found = torch.searchsorted(layer.query_steps, steps).clamp_max(layer.query_steps.numel() - 1)
    if not torch.equal(layer.query_steps[found], steps):
        raise KvtoolError(
            "trace-lacks", f"layer {layer.geometry.layer} lacks the query of a step that is to be evaluated"
        )
    return found


def gradients_at(layer: Layer, steps: Tensor) -> tuple[Tensor | None, Tensor | None, int]:
    """The layer's gradients [S, H, Tg, Dv], which of them belongs to each step [n] (-1: none), and how many
    next tokens were drawn from the first such step on.

    Raises:
        KvtoolError: code `not-finite`.
    """
    known, gradients = layer.gradient_steps, layer.output_gradients
    if layer.gradients is None or known is None or gradients is None:
        return None, None, 0
    at = torch.searchsorted(known, steps).clamp_max(known.numel() - 1)
    at = torch.where(known[at] == steps, at, -1)
    if not bool((at >= 0).any()):
        return None, None, 0
    if not all_finite(gradients):
        raise KvtoolError(
            "not-finite",
            f"a gradient of layer {layer.geometry.layer} is NaN or infinite",
            "kvtool inspect --verify names damaged files",
        )
    low, high = layer.gradients.targets
    first = int(steps[at >= 0][0])  # what was drawn before it says nothing of the evaluated steps
    return gradients, at, max(high - max(low, first), 0)


def _pool(retained: list[RetainedSet]) -> Tensor:
    """The candidates [N] of the one event that all cells share."""
    pools = []
    for cell in retained:
        if len(cell.events) != 1:
            raise KvtoolError("usage", f"--evaluate pool speaks of one event, and this run has {len(cell.events)}")
        candidates = cell.events[0].candidates
        if candidates is None:
            raise KvtoolError("usage", "--evaluate pool speaks of one event, and this schedule may have several")
        pools.append(candidates if candidates.ndim == 1 else candidates[0])
    if not pools or any(not torch.equal(pool, pools[0]) for pool in pools):
        raise KvtoolError("usage", "--evaluate pool needs cells that share one event")
    return pools[0]
