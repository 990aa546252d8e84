"""Sub-caches: small caches drawn from an event's pool, on which a policy's choice is held against exact search."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvtool.decomposition import Centre, Decompose, KVHead
from kvtool.decomposition.ladder import Damages, SubPool, damages, study, summarize
from kvtool.decomposition.subpools import draw
from kvtool.layer import Layer
from kvtool.policies import Policy, Protection
from kvtool.policies.objective import Objective
from kvtool.replay.ask import blaming, protection_of, refined_scores, scores_with, state_of
from kvtool.replay.choose import ranked
from kvtool.replay.plan import Plan
from kvtool.selection import cut
from kvtool.view import View

Say = Callable[[str], None]


def drawn(view: View, asked: Decompose, protection: Protection) -> Tensor | None:
    """[samples, Hk, n] rows of every sub-cache, ascending, from what the run itself leaves unprotected.

    None where that is fewer than n tokens.
    """
    found = []
    for kv_head, rows in enumerate(view.tokens):
        free = rows[(rows >= protection.sinks) & (rows < view.step - protection.window)]
        if free.numel() < asked.pool:
            return None
        stream = view.stream(asked.seed, kv_head).spawn(3)[2]  # the first two serve the query head of that number
        found.append(free[draw(stream, free.numel(), asked.pool, asked.samples)])
    return torch.stack(found, dim=1)


@dataclass(frozen=True, eq=False)
class Choice:
    """What one policy keeps of one sub-cache, called on it as its whole view.

    Attributes:
        kept: [Hk, b] int64, indices into the n tokens, ascending.
        objective: what it means to maximise there, None where it has no objective.
    """

    kept: Tensor
    objective: Objective | None


def choices(label: str, policy: Policy, donor: Layer, view: View, rows: Tensor, keep: int) -> list[Choice]:
    """The choice of `policy` on every sub-cache of `rows` [samples, Hk, n]; its state is built up once.

    Args:
        donor: in float64, the layer whose queries score.
        view: of the whole event.
    """
    state = state_of(label, policy, donor, view)
    found = []
    for tokens in rows:
        small = View(donor, view.step, tokens, view.step, torch.full_like(tokens, donor.tokens), view.steps_ahead)
        allowed = [keep] * tokens.shape[0]
        scores = scores_with(label, policy, donor, small, state)
        shield = protection_of(label, policy, donor, small, keep)
        scores = refined_scores(label, policy, donor, small, scores, allowed, shield)
        kept = cut(ranked(label, scores, small, shield), allowed).keep
        with blaming(label, policy, donor, small):
            objective = policy.objective(small)
        found.append(Choice(kept.nonzero()[:, 1].view(tokens.shape[0], keep), objective))
    return found


def ladder_entries(
    plan: Plan,
    layer: Layer,
    kv_head: int,
    head: KVHead,
    rows: Tensor,
    chosen: dict[str, list[Choice]],
    centres: dict[str, Centre],
    key: dict[str, Any],
    say: Say,
) -> list[dict[str, Any]]:
    """One entry per policy: exact search on the sub-caches of one KV head.

    Args:
        rows: [samples, Hk, n], as `drawn` gives them.
        chosen: policy -> its choice on each; policies that keep everything have none.
        key: the columns that every entry starts with.
    """
    asked = plan.decompose
    assert asked is not None
    known: list[Damages | None] = [None] * asked.samples  # what a set damages does not depend on who asks
    entries = []
    group = layer.geometry.group
    heads = slice(kv_head * group, (kv_head + 1) * group)
    for index, (label, mine) in enumerate(chosen.items()):
        say(f"searching KV head {kv_head}, policy {index + 1} of {len(chosen)}")
        studies = []
        for sample, choice in enumerate(mine):
            pool, sigma2 = _sub_pool(layer, head, rows[sample, kv_head], choice, kv_head, heads, centres[label])
            known[sample] = known[sample] or damages(pool, asked.keep)
            studies.append(study(pool, asked.keep, sigma2, known[sample]))
        said = {"kv_head": kv_head, "center": centres[label].source, "samples": len(studies), "pool": asked.pool}
        entries.append(
            {**key, "policy": label, "budget": asked.keep, "achieved": asked.keep, **said, **summarize(studies)}
        )
    return entries


def _sub_pool(
    layer: Layer, head: KVHead, rows: Tensor, choice: Choice, kv_head: int, heads: slice, centre: Centre
) -> tuple[SubPool, Tensor]:
    """The sub-cache of `rows` [n] as exact search reads it, and the noise [G] of its capacities: the policy's own
    ridge, and 1 where it has none."""
    at = torch.searchsorted(head.rows, rows)
    own = choice.objective
    mine = None if own is None else Objective(own.weights[heads], own.directions[heads], own.ridge[heads])
    pool = SubPool(
        queries=head.queries,
        keys=head.keys[at],
        values=head.values[at],
        rows=rows,
        scale=head.scale,
        softcap=head.softcap,
        sink_logits=head.sink_logits,
        mean=centre.mean[heads],
        covariance=centre.covariance[heads],
        objective=mine,
        one_shot=choice.kept[kv_head],
        pool_weights=None,
    )
    return pool, torch.ones(head.queries.shape[0], dtype=torch.float64) if mine is None else mine.ridge
