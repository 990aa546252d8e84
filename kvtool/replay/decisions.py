"""Decisions: what was evicted when, and how close it was, as the table `evict_steps` holds it."""

from __future__ import annotations

import math
from statistics import fmean
from typing import Any

import torch

from kvtool.layer import Geometry
from kvtool.retained import MOST_NEAR, RetainedSet


def decision_entries(key: dict[str, Any], retained: RetainedSet, geometry: Geometry) -> list[dict[str, Any]]:
    """One entry of the table `evict_steps` per KV head; `event` is the step of the first one. Ties are those of all
    events, the margin is the smallest.

    Args:
        geometry: of the layer whose cache it is.
    """
    digest, events = retained.digest(), retained.events
    margins, relative, achieved, ties = (
        [getattr(event, name).tolist() for event in events]
        for name in ("margin", "relative_margin", "achieved", "ties")
    )
    steps = [event.step for event in events]
    oldest = int(geometry.first_visible(torch.tensor(steps[-1]))) if events else None
    entries = []
    for head in range(retained.evict_step.shape[0]):
        near = [event.near[head] for event in events]
        lengths = [len(rows) for rows in near]
        listed = sum(lengths) <= MOST_NEAR
        entries.append(
            {
                **key,
                "event": steps[0] if events else None,
                "achieved": fmean(each[head] for each in achieved) if events else None,
                "kv_head": head,
                "digest": digest,
                "ties": sum(each[head] for each in ties),
                "margin": min((each[head] for each in margins if not math.isnan(each[head])), default=None),
                "event_steps": steps,
                "event_margins": [None if math.isnan(each[head]) else each[head] for each in relative],
                "event_near_ties": lengths,
                "event_ties": [each[head] for each in ties],
                "near_rows": [row for rows in near for row in rows.tolist()] if listed else None,
                "oldest_row": oldest,
                "evict_step": retained.evict_step[head].numpy(),  # as a list of Python numbers nine times the bytes
            }
        )
    return entries
