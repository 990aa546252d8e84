"""Renumbered: what attention gives when positions are counted inside the cache, queries' own included."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvtool.errors import KvtoolError
from kvtool.kernels.device import on_cpu
from kvtool.kernels.retained_attention.errors import Which
from kvtool.kernels.retained_attention.reference import CellBlock, attention, retained_attention
from kvtool.layer import Layer
from kvtool.metrics.evaluate import Evaluate, evaluate_layer, gradients_at, query_places
from kvtool.metrics.step_errors import StepErrors, measure
from kvtool.retained import RetainedSet
from kvtool.rotation import Rotation


def rotation_by_position(layer: Layer) -> Rotation | None:
    """The rotation that can place a token of `layer` anywhere, None where the layer rotates nothing.

    Raises:
        KvtoolError: code `trace-lacks` where the trace does not say how the layer rotates, or knows its rotation
            for the captured rows only (one that changes as the text grows): no key can be moved exactly.
    """
    rotation, where = layer.geometry.rotation, f"layer {layer.geometry.layer}"
    if rotation == "none":
        return None
    if not isinstance(rotation, Rotation):
        raise KvtoolError("trace-lacks", f"positions=cache moves keys, and {where} does not say how they were rotated")
    if not rotation.by_position:
        raise KvtoolError(
            "trace-lacks",
            f"positions=cache moves keys, and the rotation of {where} is known for its own rows only, not by position",
            "positions=original needs no other rotation",
        )
    return rotation


def renumbered_errors(
    layer: Layer, retained: RetainedSet, steps: Tensor, *, cell: int = 0, block: int | None = None
) -> Iterator[CellBlock]:
    """Error blocks of one cell whose cache counts its own positions (StreamingLLM, 2309.17453, section 3.2).

    At step t a KV head's live set R_t, the query's own token included, is numbered 0..|R_t|-1 by row and the query
    stands at |R_t|-1: keys and queries are turned back from their true positions and on to these. f_V keeps the true
    positions. Since logits differ, error = f_V - f_R plainly and no mass-times-gap identity holds: `gap` is NaN
    everywhere, `mass` the share that the evicted tokens had under the true positions. Where nothing visible was
    evicted there is nothing to renumber: f_R is f_V bit for bit.

    Args:
        steps: [n] int64, ascending, each with a stored query.
        cell: the index that the blocks carry.
        block: steps in a block; None chooses.

    Yields:
        Blocks of steps in order.

    Raises:
        KvtoolError: code `trace-lacks`, at the call, where keys cannot be moved.
    """
    return _blocks(layer, retained, steps, rotation_by_position(layer), cell, block)


def evaluate_cells(
    layer: Layer,
    retained: list[RetainedSet],
    steps: Tensor,
    positions: Sequence[str],
    *,
    mode: Evaluate = "live",
    future_mass: Tensor | None = None,
    which: Which = "all",
    groups: Sequence[int] | None = None,
    block: int | None = None,
) -> list[StepErrors]:
    """`evaluate_layer` where cells may differ in how their cache counts positions.

    Args:
        positions: per cell `original` or `cache`, as `Policy.positions` says. Cells with `original` are measured in
            one pass as ever; those with `cache` by `renumbered_errors`, one by one and without `future_mass`, since
            the mass that a set loses does not say what renumbering costs.
        The others as in `evaluate_layer`.

    Raises:
        KvtoolError: as `evaluate_layer` and `renumbered_errors`; `usage` for `pool` with `cache`.
    """
    moved = [index for index, word in enumerate(positions) if word == "cache"]
    if len(positions) != len(retained) or set(positions) - {"original", "cache"}:
        raise ValueError(f"positions {list(positions)} of {len(retained)} cells")
    if not moved:
        return evaluate_layer(
            layer, retained, steps, mode=mode, future_mass=future_mass, which=which, groups=groups, block=block
        )
    if mode == "pool":
        raise KvtoolError("usage", "--evaluate pool freezes a cache at its event, and positions=cache counts on")
    found: dict[int, StepErrors] = {}
    plain = [index for index in range(len(retained)) if index not in moved]
    if plain:
        kept = [retained[index] for index in plain]
        mine = None if groups is None else [groups[index] for index in plain]
        measured = evaluate_layer(
            layer, kept, steps, mode=mode, future_mass=future_mass, which=which, groups=mine, block=block
        )
        found |= dict(zip(plain, measured, strict=True))
    gradients, rows_of_steps, drawn = gradients_at(layer, steps)
    for index in moved:
        (errors,) = measure(
            renumbered_errors(layer, retained[index], steps, block=block),
            steps,
            1,
            projection=layer.output_projection,
            layer=layer.geometry.layer,
            output_gradients=gradients,
            gradient_rows=rows_of_steps,
        )
        if gradients is not None:
            errors = replace(errors, gradients=layer.gradients, drawn_steps=drawn)
        found[index] = errors
    return [found[index] for index in range(len(retained))]


def _blocks(
    layer: Layer, retained: RetainedSet, steps: Tensor, rotation: Rotation | None, cell: int, block: int | None
) -> Iterator[CellBlock]:
    geometry = layer.geometry
    on_cpu("retained_attention", "positions inside the cache have no kernel")
    queries, keys = layer.queries[:, query_places(layer, steps)], layer.keys
    original = retained_attention(
        queries,
        keys,
        layer.values,
        retained.evict_step[None],
        steps=steps,
        rows=torch.arange(layer.tokens),
        first_visible=geometry.first_visible(steps),
        scale=geometry.scale,
        softcap=geometry.softcap,
        sink_logits=geometry.sink_logits,
        block=block,
    )
    if rotation is not None:
        queries, keys = rotation.unrotate(queries, layer.positions[steps]), rotation.unrotate(keys, layer.positions)
    for found in original:
        output = found.full.clone()
        for kv_head in range(geometry.kv_heads):
            heads = slice(kv_head * geometry.group, (kv_head + 1) * geometry.group)
            leaves = retained.evict_step[kv_head]
            for run in stretches(layer, leaves, steps, found.rows):
                output[heads, run.start - found.rows.start : run.stop - found.rows.start] = _stretch(
                    layer, leaves, steps[run], queries[heads, run], keys[kv_head], kv_head, rotation
                )
        unknown = torch.full_like(found.gap, torch.nan)
        yield CellBlock(cell, found.rows, found.full, output, found.full - output, found.mass, unknown)


def stretches(layer: Layer, leaves: Tensor, steps: Tensor, part: slice) -> Iterator[slice]:
    """Runs of steps[part] through which every live token of one KV head keeps its number, so that new tokens just
    follow; steps that lost nothing they would see are left out.

    A run ends at an event, and on a layer with a window wherever its oldest live token leaves.

    Args:
        leaves: [T] evict steps of the KV head.
    """
    when = steps[part]
    since = layer.geometry.first_visible(when)
    rows = torch.arange(layer.tokens)
    visible = (rows <= when[:, None]) & (rows >= since[:, None])  # [b, T]
    live = visible & (leaves > when[:, None])
    earlier, until = (torch.cat([x[:1], x[:-1]]) for x in (live, when))  # of the step before
    same = ((live == earlier) | (rows > until[:, None])).all(1)
    touched = (visible & ~live).any(1)
    start: int | None = None
    for at in range(len(when) + 1):
        goes_on = at < len(when) and bool(touched[at])
        if start is not None and not (goes_on and bool(same[at])):
            yield slice(part.start + start, part.start + at)
            start = None
        if goes_on and start is None:
            start = at


def _stretch(
    layer: Layer,
    leaves: Tensor,
    steps: Tensor,
    queries: Tensor,
    keys: Tensor,
    kv_head: int,
    rotation: Rotation | None,
) -> Tensor:
    """[G, b, Dv], f_R of one KV head over one stretch.

    Args:
        leaves: [T]; steps: [b].
        queries: [G, b, D], keys: [T, D], both un-rotated.
    """
    rows = live_rows(layer, leaves, int(steps[-1]))
    numbers = torch.arange(len(rows))
    own = torch.searchsorted(rows, steps)  # the query stands at its own token
    moved = keys[rows]
    if rotation is not None:
        moved, queries = rotation.rotate(moved, numbers), rotation.rotate(queries, own)
    sinks = layer.geometry.sink_logits
    group = layer.geometry.group
    found: Tensor = attention(
        queries.contiguous(),
        moved[None],
        layer.values[kv_head, rows][None],
        steps=steps,
        rows=rows,
        first_visible=torch.zeros_like(steps),  # what no step of the stretch sees is not among the rows
        scale=layer.geometry.scale,
        softcap=layer.geometry.softcap,
        sink_logits=None if sinks is None else sinks[kv_head * group : (kv_head + 1) * group],
    )
    return found


def live_rows(layer: Layer, leaves: Tensor, step: int) -> Tensor:
    """[n] rows that the query of `step` sees, ascending, its own the last: a row's place is its number."""
    oldest = int(layer.geometry.first_visible(torch.tensor(step)))
    return torch.arange(oldest, step + 1)[leaves[oldest : step + 1] > step]
