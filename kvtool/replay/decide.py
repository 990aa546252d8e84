"""Decide: from a policy's scores to the retained set, for every budget at once."""

from __future__ import annotations

import torch
from torch import Tensor

from kvtool.allocator import Allocator, Uniform
from kvtool.budget import Budget
from kvtool.errors import KvtoolError
from kvtool.layer import Layer
from kvtool.policies import Policy, Protection
from kvtool.retained import Event, RetainedSet
from kvtool.selection import NaNScore, Ranking, cut, rank
from kvtool.view import View


def decide(
    layer: Layer,
    label: str,
    policy: Policy,
    budgets: list[Budget],
    step: int,
    protection: Protection,
    steps_ahead: Tensor,
    allocator: Allocator | None = None,
) -> list[RetainedSet]:
    """Run one event before query `step` on an untouched cache.

    Args:
        layer: whose keys, values and earlier queries are scored.
        steps_ahead: [F] int64 evaluated steps, shown to oracles only.

    Returns:
        One retained set per budget, in order. Tokens outside the layer's window stay untouched.

    Raises:
        KvtoolError: `policy-broken` for scores of the wrong shape or NaN.
    """
    allocator = allocator or Uniform()
    geometry = layer.geometry
    view = View.at(layer, step, steps_ahead if policy.oracle else None)
    count = view.tokens.shape[1]
    kept_all = RetainedSet.keep_all(geometry.kv_heads, layer.tokens)
    if policy.skips(geometry):
        return [_untouched(kept_all, view, protection) for _ in budgets]
    scores, diagnostics = score(layer, label, policy, view)
    decided = []
    for budget in budgets:
        allowed = allocator.allocate(budget, count, geometry.kv_heads)
        shield = protection.union(policy.protection(allowed[0]))
        selection = cut(_ranked(label, scores, view, shield), allowed)
        evict_step = kept_all.evict_step.clone()
        evict_step.scatter_(1, view.tokens, torch.where(selection.keep, layer.tokens, step).to(torch.int32))
        event = Event(
            step=step,
            candidates=view.tokens,
            budget=torch.tensor(allowed),
            achieved=selection.achieved,
            ties=selection.ties,
            margin=selection.margin,
            sinks=shield.sinks,
            window=shield.window,
            overfull=selection.overfull,
            ranking=selection.ranking if policy.nested else None,
            diagnostics=diagnostics,
        )
        decided.append(RetainedSet(evict_step, [event]))
    return decided


def score(layer: Layer, label: str, policy: Policy, view: View) -> tuple[Tensor, dict[str, Tensor]]:
    """Checked scores [Hk, N] and diagnostics of `policy` at `view`, its state built up from the start."""
    geometry = layer.geometry
    state = policy.start(geometry)
    rows = torch.arange(view.step).expand(geometry.kv_heads, -1)
    past = View(layer, view.step, rows, 0, torch.full_like(rows, layer.tokens), view.steps_ahead)
    state = policy.observe(state, past)
    scores = policy.score(state, view)
    if not isinstance(scores, Tensor) or scores.shape != view.tokens.shape or not scores.is_floating_point():
        shape = list(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise KvtoolError(
            "policy-broken",
            f"{label} gave scores {shape} at layer {geometry.layer}, expected floats {list(view.tokens.shape)}",
        )
    return scores, policy.diagnose(state, view)


def _ranked(label: str, scores: Tensor, view: View, shield: Protection) -> Ranking:
    try:
        return rank(scores, view.tokens, sinks=shield.sinks, window=shield.window, step=view.step)
    except NaNScore as found:
        raise KvtoolError(
            "policy-broken",
            f"{label} gave NaN at layer {view.geometry.layer}, KV head {found.head}, step {view.step}, "
            f"token {found.row}",
            "scores must be numbers; -inf says evict first",
        ) from None


def _untouched(retained: RetainedSet, view: View, protection: Protection) -> RetainedSet:
    heads, count = view.tokens.shape
    event = Event(
        step=view.step,
        candidates=view.tokens,
        budget=torch.full((heads,), count),
        achieved=torch.full((heads,), count),
        ties=torch.zeros(heads, dtype=torch.int64),
        margin=torch.full((heads,), float("nan"), dtype=torch.float64),
        sinks=protection.sinks,
        window=protection.window,
    )
    return RetainedSet(retained.evict_step, [event])
