"""Decisions: what was evicted when, and how close it was, as the table `evict_steps` holds it."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import torch

from kvtool.layer import Geometry
from kvtool.metrics import nullable
from kvtool.retained import MOST_NEAR, RetainedSet


def decision_entries(key: dict[str, Any], retained: RetainedSet, geometry: Geometry) -> list[dict[str, Any]]:
    """One entry of the table `evict_steps` per KV head; `event` is the step of the first one. Ties are those of all
    events, the margin is the smallest.

    Args:
        geometry: of the layer whose cache it is.
    """
    digest, events = retained.digest(), retained.events
    none = torch.empty(0, len(retained.evict_step))
    margins = torch.stack([event.margin for event in events]) if events else none
    relative = torch.stack([event.relative_margin for event in events]) if events else none
    oldest = int(geometry.first_visible(torch.tensor(events[-1].step))) if events else None
    lowest = [[value for value in of_head if value == value] for of_head in margins.T.tolist()]  # NaN left out
    closest = [nullable(of_head) for of_head in relative.T]
    ties = [event.ties.tolist() for event in events]
    achieved = [event.achieved.tolist() for event in events]
    entries = []
    for head in range(retained.evict_step.shape[0]):
        near = [event.near[head] for event in events]
        listed = sum(len(rows) for rows in near) <= MOST_NEAR
        entries.append(
            {
                **key,
                "event": events[0].step if events else None,
                "achieved": fmean(float(of_heads[head]) for of_heads in achieved) if events else None,
                "kv_head": head,
                "digest": digest,
                "ties": sum(of_heads[head] for of_heads in ties),
                "margin": min(lowest[head], default=None),
                "event_steps": [event.step for event in events],
                "event_margins": closest[head],
                "event_near_ties": [len(rows) for rows in near],
                "event_ties": [of_heads[head] for of_heads in ties],
                "near_rows": [row for rows in near for row in rows.tolist()] if listed else None,
                "oldest_row": oldest,
                "evict_step": retained.evict_step[head].numpy(),  # as a list of Python numbers nine times the bytes
            }
        )
    return entries
