"""Cuts: what a baseline keeps of a KV head whose decisions rounding can turn, so that a tie is told from a change.

{"events": [[step, exact ties, [row, …]], …], "evict_step": zlib of T little-endian int32, as base64}; the rows are
those of the near ties.
"""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

import numpy as np

from kvtool.compare.ties import Cuts, Ids, in_ties

MOST_BYTES = 1 << 26  # of one head's evict steps: 16 million tokens


def short_digest(evict_step: Ids) -> str:
    """Eight hex digits that tell one head's evict steps [T] from others."""
    return hashlib.sha256(np.asarray(evict_step, dtype="<i4").tobytes()).hexdigest()[:8]


def packed(
    evict_step: Ids, steps: Iterable[int], near: Iterable[int], exact: Iterable[int], rows: Iterable[int] | None
) -> dict[str, Any] | None:
    """What is kept of one head: events without a near tie are left out, since nothing can be a tie there.

    Args:
        evict_step: [T].
        steps, near, exact, rows: as the table `evict_steps` has them.

    Returns:
        None where no event has a near tie, or where there are too many to be listed.
    """
    if rows is None:
        return None
    left = iter(rows)
    counted = zip(steps, near, exact, strict=True)
    events = [[step, ties, list(islice(left, count))] for step, count, ties in counted if count > 0]
    if not events:
        return None
    raw = zlib.compress(np.asarray(evict_step, dtype="<i4").tobytes(), 9)
    return {"events": events, "evict_step": base64.b64encode(raw).decode()}


def unpacked(entry: Mapping[str, Any]) -> tuple[Ids, Cuts]:
    """[T] evict steps, and how close the cuts were.

    Raises:
        ValueError: what `packed` did not make.
    """
    events = entry["events"]
    steps = [step for step, _, _ in events]
    whole = all(type(number) is int for step, ties, rows in events for number in (step, ties, *rows))
    if (
        not steps
        or not whole
        or steps != sorted(set(steps))
        or not all(0 <= ties <= len(set(rows)) > 0 for _, ties, rows in events)
    ):
        raise ValueError("events are [step, exact ties, [rows of near ties]], in their order")
    unpack = zlib.decompressobj()
    try:
        raw = unpack.decompress(base64.b64decode(entry["evict_step"], validate=True), MOST_BYTES)
    except zlib.error as error:
        raise ValueError(f"evict_step: {error}") from error
    if not unpack.eof or unpack.unused_data or len(raw) % 4:
        raise ValueError("evict_step is cut off, or too long")
    near = {step: frozenset(rows) for step, _, rows in events}
    return np.frombuffer(raw, dtype="<i4").astype(np.int64), Cuts(near, {step: ties for step, ties, _ in events})


def rounding_can_turn(entry: Mapping[str, Any]) -> bool:
    """Whether some event has near ties that are not all exact: then the next machine may decide otherwise."""
    return any(len(rows) != ties for _, ties, rows in entry["events"])


def same_cuts(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether two entries say the same; zlib may spell it in other bytes elsewhere."""
    steps_a, steps_b = unpacked(a)[0], unpacked(b)[0]
    return a["events"] == b["events"] and np.array_equal(steps_a, steps_b)


def rounding_parts(old: Mapping[str, Any] | None, new: Mapping[str, Any] | None, coarser: str | None = None) -> bool:
    """Whether the decisions of a head part among near ties only, by the rule of kvtool.compare.ties.

    Args:
        old, new: entries of the head; None where decisions are compared exactly.
        coarser: `a` for old or `b` for new, where that side alone was computed in float32.
    """
    if old is None or new is None:
        return False
    (before, cuts_before), (now, cuts_now) = unpacked(old), unpacked(new)
    if len(before) != len(now):
        return False
    return np.array_equal(before, now) or in_ties(before, now, cuts_before, cuts_now, coarser)
