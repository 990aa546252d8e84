"""Events: one entry per event of a cell in one layer; nothing in it depends on the machine."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvtool.layer import Geometry, Layer
from kvtool.metrics import StepErrors, nullable
from kvtool.metrics.ages import evenly
from kvtool.metrics.attention_entropy import attention_entropy
from kvtool.metrics.cache_size import bytes_per_token
from kvtool.metrics.metric import mean_of_defined
from kvtool.metrics.output_error import relative
from kvtool.metrics.paging import PAGE_TOKENS, paging
from kvtool.replay.plan import Cell
from kvtool.retained import DEADLINE, FACTORISATION, Event, RetainedSet

MOST_EVENTS = 10_000  # of one layer with all its cells
Key = dict[str, Any]


def shown_events(decided: list[RetainedSet], most: int = MOST_EVENTS) -> list[list[Event]]:
    """Per cell the events that get entries: all, or evenly spaced ones where a layer has more than `most`."""
    total = sum(len(retained.events) for retained in decided)
    if total <= most:
        return [list(retained.events) for retained in decided]
    share = max(2, most // sum(bool(retained.events) for retained in decided))
    return [list(evenly(retained.events, share)) for retained in decided]


def event_entries(
    keys: list[Key],
    cells: list[Cell],
    layer: Layer,
    donor: Geometry,
    decided: list[RetainedSet],
    errors: list[StepErrors],
) -> list[Key]:
    """The table `events` of one layer.

    Args:
        keys: of every cell, the key columns of its entries; `event` and `achieved` are filled in.
        layer: whose queries are meant.
        donor: of the layer whose cache it reads, usually its own: candidates and pages are that cache's.
    """
    shown = shown_events(decided)
    before = [[event.step - 1 for event in events] for events in shown]
    entropies = attention_entropy(layer, [retained.evict_step for retained in decided], before)
    entries = []
    for key, cell, retained, found, events, entropy in zip(keys, cells, decided, errors, shown, entropies, strict=True):
        for event in events:
            entries.append(
                {
                    **key,
                    "event": event.step,
                    "achieved": float(event.achieved.min()),
                    **_chosen(event, retained, donor),
                    **_errors_at(event.step, found),
                    "attention_entropy": entropy.get(event.step - 1),
                    **_laid_out(event, retained, donor, bytes_per_token(layer.geometry), cell.schedule.block),
                }
            )
    return entries


def _chosen(event: Event, retained: RetainedSet, geometry: Geometry) -> Key:
    """What the event found and left."""
    oldest = int(geometry.first_visible(torch.tensor(event.step)))
    rows = torch.arange(oldest, event.step)
    there = retained.evict_step[:, oldest : event.step] >= event.step  # [Hk, N]
    shielded = (rows < event.sinks) | (rows >= event.step - event.window)
    before, after = int(there.sum()), int(event.achieved.sum())
    fallback = torch.zeros(1) if event.fallback is None else event.fallback
    found = there.sum(1)
    return {
        "candidates_min": int(found.min()),
        "candidates_max": int(found.max()),
        "allowed_min": int(torch.minimum(event.budget, found).min()),
        "allowed_max": int(torch.minimum(event.budget, found).max()),
        "achieved_min": int(event.achieved.min()),
        "achieved_max": int(event.achieved.max()),
        "evicted": before - after,
        "protected_tokens": int((there & shielded).sum()),
        "overfull": event.overfull,
        "ties": int(event.ties.sum()),
        "margin": min(event.margin[~event.margin.isnan()].tolist(), default=None),
        "factorisation_fallbacks": int((fallback == FACTORISATION).sum()),
        "deadline_fallbacks": int((fallback == DEADLINE).sum()),
        "cache_before": before,
        "cache_after": after,
    }


def _errors_at(step: int, found: StepErrors) -> Key:
    """Errors of query `step` alone; null where it was not evaluated."""
    here = (found.steps == step).nonzero()[:, 0]
    if not here.numel():
        return {"layer_error": None, "output_error": None}
    heads = relative(found.squared_error[:, here], found.squared_output[:, here])
    layer: Tensor | None = None
    if found.layer_squared_error is not None and found.layer_squared_output is not None:
        layer = relative(found.layer_squared_error[here], found.layer_squared_output[here])
    return {"layer_error": None if layer is None else nullable(layer)[0], "output_error": mean_of_defined(heads)}


def _laid_out(event: Event, retained: RetainedSet, geometry: Geometry, token_bytes: int, block: int) -> Key:
    """Pages and moves; whole pages are remapped, so nothing moves."""
    page = block if block > 1 else PAGE_TOKENS
    oldest = int(geometry.first_visible(torch.tensor(event.step)))
    found = paging(retained.evict_step, event.step, oldest, page)
    moved = 0 if block > 1 else found.pop("moved_tokens")
    found.pop("moved_tokens", None)
    return {"page_tokens": page, **found, "compaction_bytes": moved * token_bytes}
