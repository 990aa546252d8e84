"""Decomposable: whether a trace holds what `--decompose` reads, and what it will cost, before anything runs."""

from __future__ import annotations

from kvtool.decomposition.center import source_of
from kvtool.decomposition.settings import DRAWS, EXCLUDE, Decompose
from kvtool.errors import KvtoolError
from kvtool.layer import Layer
from kvtool.policies import Policy
from kvtool.replay.plan import Plan
from kvtool.rotation import Rotation
from kvtool.trace import Sequence
from kvtool.words import spans

EXPONENTIAL = 8  # what an exponential costs, in multiplications
CALL_CELL, CALL_HEAD = 2e7, 1e7  # what one cell of a layer costs the replay, and one of its heads the decomposition
DAMAGE, RUNGS = 2e3, 1e4  # what a subset of a sub-cache costs by itself, and for a policy with an objective

Work = list[tuple[Sequence, int, int]]


def decomposable(plan: Plan, work: Work) -> list[str]:
    """Warnings of what will be missing from a decomposition.

    Raises:
        KvtoolError: `trace-lacks` where the centre cannot be computed, `usage` where no layer has enough tokens
            for a sub-cache, or a policy counts positions inside its cache.
    """
    asked = plan.decompose
    assert asked is not None
    moved = next((label for label, policy in plan.policies if policy.positions == "cache"), None)
    if moved is not None:
        raise KvtoolError(
            "usage",
            f"--decompose tells apart what eviction does at true positions, and {moved} counts them inside its cache",
            "decompose with positions=original, or replay without --decompose",
        )
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
    """One sentence: how much there is to do, and roughly what that is beside the replay alone.

    Counted in multiplications, with what a call costs by itself: measured on small traces, right within a factor
    of about two.
    """
    asked = plan.decompose
    assert asked is not None
    heads, most, sub_caches, alone, added = 0, 0, 0, 0.0, 0.0
    for sequence, layer_id, step in work:
        layer = sequence.layer(layer_id)
        geometry = layer.geometry
        ahead = int((layer.query_steps >= step).sum())
        queries, pool = min(ahead, asked.horizon), step - _first(layer, step)
        kept = sum(budget.resolve(pool) for budget in plan.budgets) * len(plan.policies)  # over all cells
        heads, most = heads + geometry.query_heads, max(most, queries)
        alone += len(plan.cells) * CALL_CELL + 4 * geometry.query_heads * ahead * (
            (pool + ahead) * geometry.key_dim + kept * geometry.value_dim
        )
        width = geometry.key_dim + geometry.value_dim
        of_cells = kept * (queries * (width + EXPONENTIAL) + width * geometry.key_dim)
        of_draws = DRAWS * queries * (geometry.value_dim + 2 * EXPONENTIAL)
        added += geometry.query_heads * (of_cells + len(plan.cells) * (of_draws + CALL_HEAD))
        if asked.samples and unprotected(layer, step, plan) >= asked.pool:
            sub_caches += asked.samples * geometry.kv_heads
            sets = asked.samples * asked.subsets * geometry.query_heads
            searching = sum(type(policy).objective is not Policy.objective for _, policy in plan.policies)
            added += sets * (queries * geometry.value_dim / 4 + DAMAGE + searching * RUNGS)
    text = f"decomposing {len(plan.cells)} cells x {heads} query heads x up to {most} queries"
    if sub_caches:
        text += f", and exact search over {asked.subsets:,} subsets in each of {sub_caches:,} sub-caches"
    return f"{text}: roughly {max(1.0, added / alone):,.0f} times the work of the replay alone"
