"""Decisions: what was evicted when, and how close it was, as the table `evict_steps` holds it."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import torch

from kvtool.metrics import nullable
from kvtool.retained import RetainedSet


def decision_entries(key: dict[str, Any], retained: RetainedSet) -> list[dict[str, Any]]:
    """One entry of the table `evict_steps` per KV head; `event` is the step of the first one. Ties are those of all
    events, the margin is the smallest."""
    digest, events = retained.digest(), retained.events
    none = torch.empty(0, len(retained.evict_step))
    margins = torch.stack([event.margin for event in events]) if events else none
    relative = torch.stack([event.relative_margin for event in events]) if events else none
    return [
        {
            **key,
            "event": events[0].step if events else None,
            "achieved": fmean(float(event.achieved[head]) for event in events) if events else None,
            "kv_head": head,
            "digest": digest,
            "ties": sum(int(event.ties[head]) for event in events),
            "margin": min(margins[:, head][~margins[:, head].isnan()].tolist(), default=None),
            "event_steps": [event.step for event in events],
            "event_margins": nullable(relative[:, head]),
            "event_near_ties": [int(event.near_ties[head]) for event in events],
            "event_ties": [int(event.ties[head]) for event in events],
            "evict_step": retained.evict_step[head].tolist(),
        }
        for head in range(retained.evict_step.shape[0])
    ]
