"""Counts: what the events of one cell in one layer add up to, beside what the metrics say."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from kvtool.retained import DEADLINE, Event, RetainedSet


def achieved_of(retained: RetainedSet) -> dict[str, float | None]:
    """Tokens that the smallest KV head kept, mean over events; None where none ran."""
    kept = [float(min(event.achieved.tolist())) for event in retained.events]
    return {"achieved": fmean(kept) if kept else None}


def evicted_of(retained: Sequence[RetainedSet]) -> list[int]:
    """Per cell of one layer the tokens that left, over all KV heads and events."""
    return [int((kept.evict_step < kept.tokens).sum()) for kept in retained]


def counts_of(retained: RetainedSet, tokens: int, evicted: int | None = None) -> dict[str, float]:
    """How many events there were, the candidates they had on average, and how often the window decided instead.

    Args:
        evicted: what `evicted_of` says of it, where it was asked already.
    """
    found = [float(max(event.found.tolist())) for event in retained.events if event.found is not None]
    instead = [event.fallback.tolist() for event in retained.events if event.fallback is not None]
    return {
        "candidates": fmean(found) if found else math.nan,
        "events": len(retained.events),
        "evicted": int((retained.evict_step < tokens).sum()) if evicted is None else evicted,
        "fallbacks": sum(any(reason > 0 for reason in one) for one in instead),
        "deadline_fallbacks": sum(DEADLINE in one for one in instead),
    }


def counts_at(event: Event | None) -> dict[str, float | None]:
    """The same of one event alone."""
    alone = RetainedSet(torch.empty(0, 0), [event] if event else [])
    evicted = None if event is None or event.found is None else int((event.found - event.achieved).sum())
    return {**counts_of(alone, 0), "evicted": evicted}


def window_decided(retained: RetainedSet, fallbacks: float) -> bool:
    """Whether the window decided at every event at which a token had to leave, and there was one."""
    evicting = sum(
        any(found > kept for found, kept in zip(event.found.tolist(), event.achieved.tolist(), strict=True))
        for event in retained.events
        if event.found is not None
    )
    return 0 < evicting == fallbacks


def stored(counts: dict[str, Any]) -> dict[str, Tensor]:
    """As a part keeps them: None is NaN."""
    known = [math.nan if value is None else float(value) for value in counts.values()]
    return dict(zip(counts, torch.tensor(known, dtype=torch.float64).unbind(), strict=True))
