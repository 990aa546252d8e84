"""Landmarks: which of the rows that are known to matter were still there at the end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvtool.retained import RetainedSet


def landmark_entries(retained: RetainedSet, landmarks: Mapping[str, list[int]]) -> list[dict[str, Any]]:
    """One entry per KV head and landmark.

    A row counts as kept if the query of the last step could still have seen it, as far as eviction goes:
    its `evict_step` is T.

    Args:
        landmarks: name -> rows, none outside the sequence.

    Returns:
        `kv_head`, `landmark`, `rows` (how many there are), `kept` (of them), and `first_lost`, the step of the
        first event that evicted one of them, None where all were kept.
    """
    tokens = retained.evict_step.shape[1]
    entries: list[dict[str, Any]] = []
    if not landmarks:  # of most sequences none is known
        return entries
    for head, steps in enumerate(retained.evict_step.tolist()):
        for name, rows in landmarks.items():
            lost = [steps[row] for row in rows if steps[row] < tokens]
            entries.append(
                {
                    "kv_head": head,
                    "landmark": name,
                    "rows": len(rows),
                    "kept": len(rows) - len(lost),
                    "first_lost": min(lost, default=None),
                }
            )
    return entries
