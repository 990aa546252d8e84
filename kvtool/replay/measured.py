"""Measured: every metric of the cells of one layer, those that were evaluated at the same steps all at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from kvtool.layer import Layer
from kvtool.metrics import StepErrors
from kvtool.metrics.step_errors import between
from kvtool.replay.metric_columns import columns_of
from kvtool.replay.parts import Partial
from kvtool.replay.plan import Plan
from kvtool.retained import RetainedSet
from kvtool.schedule import Schedule

MOST_NUMBERS = 1 << 21  # of one kind, of all cells that are looked at together: metrics copy them
Columns = tuple[dict[str, list[Any]], dict[str, Any]]  # of query heads [H], and of the layer


def measured_cells(
    plan: Plan,
    layer: Layer,
    decided: Sequence[RetainedSet],
    errors: Sequence[StepErrors],
    starts: Mapping[Schedule, int],
    masses: Mapping[int, Tensor],
) -> list[tuple[Partial, Columns]]:
    """Of every cell of the plan, each from the first step that its schedule evaluates.

    Args:
        starts: that step, by schedule.
        masses: [Hk, T] future attention by first evaluated step, for cells with one event; none where it is not asked.
    """
    found: dict[int, tuple[Partial, Columns]] = {}
    for start in dict.fromkeys(starts.values()):
        places = [place for place, cell in enumerate(plan.cells) if starts[cell.schedule] == start]
        mine = between([errors[place] for place in places], start, layer.tokens)
        for index, place in enumerate(places):
            cell = plan.cells[place]
            if not cell.schedule.repeats and cell.policy.positions == "original":
                mine[index] = replace(mine[index], future_mass=masses.get(start))
        kept = [decided[place] for place in places]
        width = max(mine[0].squared_error.numel(), kept[0].evict_step.numel(), 1)
        some = max(1, MOST_NUMBERS // width)
        for begin in range(0, len(places), some):
            part = slice(begin, begin + some)
            each = measured_alike(plan, layer, kept[part], mine[part])
            found |= dict(zip(places[part], each, strict=True))
    return [found[place] for place in range(len(plan.cells))]


def measured_alike(
    plan: Plan, layer: Layer, decided: Sequence[RetainedSet], errors: Sequence[StepErrors]
) -> list[tuple[Partial, Columns]]:
    """Of these cells, all evaluated at the same steps: what is stored, and the columns of the tables."""
    metrics = plan.metrics
    by_metric = {name: metric.partials(errors, layer.geometry, decided) for name, metric in metrics.items()}
    partials = [{name: each[place] for name, each in by_metric.items()} for place in range(len(decided))]
    found: list[tuple[Partial, Columns]] = []
    empty = [None] * layer.geometry.query_heads
    for partial, mine, (heads, alone) in zip(partials, errors, columns_of(metrics, by_metric), strict=True):
        block = None if mine.gradients is None else mine.gradients.block
        heads |= {"predicted_kl_block": [block] * layer.geometry.query_heads}
        heads |= {"rho": empty, "jitter": empty, "fallback": empty}  # one schema, whichever policies ran
        found.append((partial, (heads, {**alone, "predicted_kl_block": block})))
    return found
