"""Decide: from a policy's scores to the retained set, for every budget at once."""

from __future__ import annotations

import torch
from torch import Tensor

from kvtool.allocator import Allocator, Uniform
from kvtool.budget import Budget
from kvtool.errors import KvtoolError
from kvtool.layer import Layer
from kvtool.policies import Policy, Protection
from kvtool.replay.ask import protection_of, refined_scores, scores_of
from kvtool.retained import Event, RetainedSet
from kvtool.selection import NaNScore, Ranking, cut, rank
from kvtool.trace import Sequence
from kvtool.view import View


def donor_of(sequence: Sequence, layer: Layer) -> Layer:
    """The layer whose cache `layer` reads: its own, or its donor's."""
    source = layer.geometry.kv_source
    return layer if source is None else sequence.layer(source, dtype=layer.dtype)


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
    scores, diagnostics = scores_of(label, policy, layer, view)
    shields: list[Protection] = []
    decided = []
    for budget in budgets:
        allowed = allocator.allocate(budget, count, geometry.kv_heads)
        shields.append(protection.union(protection_of(label, policy, layer, view, allowed[0])))
        shield = shields[-1]
        refined = refined_scores(label, policy, layer, view, scores, allowed, shield)
        selection = cut(ranked(label, refined, view, shield), allowed)
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
            # one ranking for all budgets only where the protection does not depend on the budget
            ranking=selection.ranking if policy.nested and shield == shields[0] else None,
            diagnostics=diagnostics,
        )
        decided.append(RetainedSet(evict_step, [event]))
    return decided


def ranked(label: str, scores: Tensor, view: View, shield: Protection) -> Ranking:
    """The order of the candidates, NaN blamed on the policy."""
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
