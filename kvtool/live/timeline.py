"""Timeline: what eviction does to the predictions between one event and the next."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from kvtool.layer import Geometry
from kvtool.live.measures import Predictions
from kvtool.metrics.cache_size import live_tokens
from kvtool.replay.unit import MOST_SPANS
from kvtool.retained import RetainedSet
from kvtool.schedule import Schedule
from kvtool.trace import Sequence

SUMMED = "steps"  # the column that means over sequences add up


def spans_of(schedule: Schedule, sequence: Sequence, retained: Mapping[int, RetainedSet]) -> list[tuple[int, int]]:
    """Half-open spans of steps, each from an event to the next; none under a schedule of one event.

    Where the schedule goes by what the caches hold, an event of any layer ends a span. Beyond MOST_SPANS of them
    several events in a row share one.
    """
    if not schedule.repeats:
        return []
    events = schedule.planned(sequence.prompt_length, sequence.length)
    if events is None:
        events = sorted({event.step for decided in retained.values() for event in decided.events})
    together = math.ceil(len(events) / MOST_SPANS)
    return list(itertools.pairwise([*events[:: max(together, 1)], sequence.length]))


def timeline_entries(
    key: dict[str, Any],
    spans: list[tuple[int, int]],
    first: int,
    predictions: Predictions,
    drawn: Tensor,
    retained: Mapping[int, RetainedSet],
    geometries: Mapping[int, Geometry],
) -> list[dict[str, Any]]:
    """One entry per span.

    Args:
        first: the step that `predictions` begin at.
        drawn: [n] bool, the steps from `first` on that `predicted_kl` speaks of.
        geometries: of the layers in `retained`.
    """
    live = [live_tokens(decided.evict_step, geometries[layer]) for layer, decided in retained.items()]
    found = []
    for start, stop in spans:
        here = slice(start - first, stop - first)
        kl = predictions.kl[here]
        sound = not bool(kl.isnan().any())
        targets = kl[drawn[here]]
        cache = torch.cat([tokens[:, start:stop].reshape(-1) for tokens in live]).to(torch.float64)
        found.append(
            {
                **key,
                "step_from": start,
                "step_to": stop,
                SUMMED: stop - start,
                "measured_kl": float(kl.mean()) if sound else None,
                "measured_kl_max": float(kl.max()) if sound else None,
                "measured_kl_targets": float(targets.mean()) if sound and targets.numel() else None,
                "top1_agreement": float(predictions.agree[here].to(torch.float64).mean()) if sound else None,
                "mean_cache_tokens": float(cache.mean()),
                "peak_cache_tokens": float(cache.max()),
            }
        )
    return found


def mean_timeline(entries: list[dict[str, Any]], sequences: int) -> list[dict[str, Any]]:
    """The means over sequences, `sequence` null, of the spans that all of them have."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for entry in entries:
        names = ("policy", "ratio", "budget", "schedule", "step_from", "step_to")
        groups.setdefault(tuple(entry[name] for name in names), []).append(entry)
    found = []
    for members in groups.values():
        if len(members) < sequences:
            continue
        mean = dict(members[0], sequence=None)
        for name, value in members[0].items():
            if name == SUMMED:
                mean[name] = sum(member[name] for member in members)
            elif name not in ("step_from", "step_to", "budget", "ratio", "event") and not isinstance(value, str):
                values = [member[name] for member in members]
                # A mean over the harmless ones would flatter.
                mean[name] = None if name == "sequence" or None in values else fmean(values)
        found.append(mean)
    return found
