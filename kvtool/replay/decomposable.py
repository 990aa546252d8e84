"""Decomposable: whether a trace holds what `--decompose` reads, and what it will cost, before anything runs."""

from __future__ import annotations

import math

from kvtool.decomposition.center import source_of
from kvtool.decomposition.settings import DRAWS, EXCLUDE, Decompose
from kvtool.errors import KvtoolError
from kvtool.layer import Layer
from kvtool.replay.plan import Plan
from kvtool.rotation import Rotation
from kvtool.trace import Sequence
from kvtool.words import spans

Work = list[tuple[Sequence, int, int]]


def decomposable(plan: Plan, work: Work) -> list[str]:
    """Warnings of what will be missing from a decomposition.

    Raises:
        KvtoolError: `trace-lacks` where the centre cannot be computed, `usage` where no layer has enough tokens
            for a sub-cache.
    """
    asked = plan.decompose
    assert asked is not None
    free: dict[tuple[int, int], int] = {}
    for sequence, layer_id, step in work:
        layer = sequence.layer(layer_id)
        reason = _no_centre(layer, step, asked)
        if reason is not None:
            raise KvtoolError(
                "trace-lacks",
                f"--center {asked.center} cannot be computed: layer {layer_id} {reason}",
                "--center future needs the evaluated queries alone",
            )
        free[sequence.index, layer_id] = unprotected(layer, step, plan)
    if not asked.samples:
        return []
    short = {place: count for place, count in free.items() if count < asked.pool}
    if len(short) == len(free):
        most = max(free.values())
        raise KvtoolError(
            "usage",
            f"--pool {asked.pool} cannot be drawn: no layer has more than {most} unprotected candidates",
            "a smaller --pool, --sinks or --window, or --samples 0 to leave exact search out",
        )
    if not short:
        return []
    layers = spans(sorted({layer_id for _, layer_id in short}))
    return [f"no exact search in layers {layers}: fewer than {asked.pool} unprotected candidates to draw from"]


def _no_centre(layer: Layer, step: int, asked: Decompose) -> str | None:
    """Why this layer has no centre of the kind asked for, or None."""
    source = source_of(layer, asked)
    if source == "future":
        return None
    stop = min(step, layer.prompt_length) if source == "prompt" else step
    first = max(0, min(EXCLUDE, stop - 1))
    held = int(((layer.query_steps >= first) & (layer.query_steps < stop)).sum())
    if held < stop - first:
        return f"holds {held} of the {stop - first} queries before the event"
    rotation = layer.geometry.rotation
    if source == "rope_mean" and rotation is None:
        return "does not say how queries and keys were rotated"
    if source == "rope_mean" and isinstance(rotation, Rotation) and not rotation.by_position:
        return "has a rotation that is known for its own rows only, not for future positions"
    return None


def unprotected(layer: Layer, step: int, plan: Plan) -> int:
    """Candidates in one KV head that the run's own protection leaves open."""
    first, shield = _first(layer, step), plan.protection
    return max(0, step - shield.window - max(first, shield.sinks))


def _first(layer: Layer, step: int) -> int:
    """The oldest candidate."""
    kind, window = layer.geometry.kind, layer.geometry.window
    if window is None or kind == "full":
        return 0
    return max(0, step - window + 1) if kind == "sliding" else step // window * window


def stated_cost(plan: Plan, work: Work) -> str:
    """One sentence: how much there is to do, and roughly what that is beside the replay alone."""
    asked = plan.decompose
    assert asked is not None
    heads, evaluated, alone, added, searched = 0, 0, 0.0, 0.0, 0.0
    studied = sum(not policy.keeps_all for _, policy in plan.policies)
    for sequence, layer_id, step in work:
        layer = sequence.layer(layer_id)
        geometry = layer.geometry
        ahead = int((layer.query_steps >= step).sum())
        queries, pool = min(ahead, asked.horizon), step - _first(layer, step)
        width, kv_heads, all_heads = geometry.key_dim + geometry.value_dim, geometry.kv_heads, geometry.query_heads
        heads, evaluated = heads + all_heads, max(evaluated, queries)
        kept = [pool if b.ratio is None else math.ceil((1 - float(b.ratio)) * pool) for b in plan.budgets]
        kept = [n if b.tokens is None else min(b.tokens, pool) for n, b in zip(kept, plan.budgets, strict=True)]
        tokens = len(plan.policies) * sum(kept)  # over all cells
        sets = len(plan.cells)
        alone += all_heads * (ahead * (pool + ahead) * geometry.key_dim + ahead * tokens * geometry.value_dim)
        alone += all_heads * len(plan.policies) * step * width * 8
        here = queries * tokens * (width + EXPONENTIAL) + tokens * width * geometry.key_dim
        here += sets * (DRAWS * queries * (geometry.value_dim + 2 * EXPONENTIAL) + 60 * geometry.value_dim**3)
        added += all_heads * here
        if asked.samples and unprotected(layer, step, plan) >= asked.pool:
            sets_seen = asked.samples * asked.subsets
            searched += kv_heads * asked.samples
            added += all_heads * sets_seen * (queries * asked.keep * geometry.value_dim + studied * DETERMINANT)
    text = f"decomposing {len(plan.cells)} cells x {heads} query heads x up to {evaluated} queries"
    if searched:
        text += f", and exact search over {asked.subsets:,} subsets in each of {searched:.0f} sub-caches"
    times = added / max(alone, 1.0)
    return f"{text}: roughly {times:.0f} times the work of the replay alone"


EXPONENTIAL = 8  # what an exponential costs, in multiplications
DETERMINANT = 500  # and the capacities of one subset of a sub-cache
