"""Trial: a metric on made-up layers, so that what it hands out is known before hours of work depend on it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvtool.example_layer import example_layer
from kvtool.layer import Layer
from kvtool.metrics.asked import Asked
from kvtool.metrics.evaluate import evaluate_layer
from kvtool.metrics.step_errors import StepErrors
from kvtool.retained import Event, RetainedSet


def one_event(layer: Layer, step: int, keep: int, *, seed: int = 0, several: bool = False) -> RetainedSet:
    """What a single event before row `step` leaves when it keeps `keep` random candidates per KV head.

    Args:
        several: as an event of a schedule of several is told of: without candidates and ranking.
    """
    heads, stream = layer.geometry.kv_heads, torch.Generator().manual_seed(seed)
    first = int(layer.geometry.first_visible(torch.tensor(step)))
    rows = torch.arange(first, step)
    keep = min(keep, len(rows))
    ranking = torch.stack([torch.randperm(len(rows), generator=stream) + 1 for _ in range(heads)])  # [Hk, N]
    evict_step = torch.full((heads, layer.tokens), layer.tokens, dtype=torch.int32)
    evict_step[:, first:step] = torch.where(ranking <= keep, layer.tokens, step).to(torch.int32)
    each = torch.full((heads,), keep, dtype=torch.int64)
    event = Event(
        step=step,
        candidates=None if several else rows,
        budget=each,
        achieved=each,
        ties=torch.zeros_like(each),
        margin=(unknown := torch.full((heads,), torch.nan, dtype=torch.float64)),
        relative_margin=unknown,
        near=[torch.empty(0, dtype=torch.int64) for _ in each],
        sinks=0,
        window=0,
        ranking=None if several else ranking,
        found=torch.full_like(each, len(rows)),
    )
    return RetainedSet(evict_step, [event])


def then(first: RetainedSet, second: RetainedSet) -> RetainedSet:
    """Both events: a token leaves at the one that evicts it first."""
    return RetainedSet(torch.minimum(first.evict_step, second.evict_step), [*first.events, *second.events])


def measured(layer: Layer, sets: Sequence[RetainedSet], start: int) -> list[StepErrors]:
    """The errors of these sets at the stored queries from row `start` on, with the future mass of every row."""
    steps = layer.query_steps[layer.query_steps >= start]
    stream = torch.Generator().manual_seed(start)
    mass = torch.rand(layer.geometry.kv_heads, layer.tokens, generator=stream, dtype=torch.float64)
    return evaluate_layer(layer, list(sets), steps, future_mass=mass)


def trial(asked: Asked) -> None:
    """Everything once, on two small layers and two sequences.

    Raises:
        KvtoolError: code `metric-broken`.
    """
    cells = []
    for sequence in range(2):
        partials = []
        for index in range(2):
            layer = example_layer(24, seed=10 * sequence + index)
            retained = one_event(layer, 16, 6, seed=index)
            (errors,) = measured(layer, [retained], 16)
            partials.append(asked.partial(errors, layer.geometry, retained))
        asked.expect_heads(asked.shares(partials), [layer.geometry.query_heads] * len(partials))
        cells.append(asked.combine(partials))
    asked.average(cells)
