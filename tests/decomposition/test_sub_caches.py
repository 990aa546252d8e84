"""Sub-caches: what is drawn, and what a policy keeps of them when called on them as its whole view."""

from __future__ import annotations

from typing import Any

import torch

from kvtool.decomposition import Decompose
from kvtool.decomposition.subpools import draw
from kvtool.policies import Protection, policy_from_text
from kvtool.replay.sub_caches import choices, drawn
from kvtool.trace import open_trace
from kvtool.view import View

STEP = 34


def view_of(traced: Any, layer_id: int) -> tuple[Any, View]:
    layer = open_trace(traced()).sequences[0].layer(layer_id, dtype=torch.float64)
    return layer, View.at(layer, STEP)


def test_only_what_the_run_leaves_unprotected_is_drawn(traced: Any) -> None:
    asked = Decompose(samples=40, pool=8, keep=3)
    for layer_id, oldest in ((0, 3), (1, STEP - 26)):  # sinks, and what the window still shows
        _, view = view_of(traced, layer_id)
        rows = drawn(view, asked, Protection(3, 5))
        assert rows is not None
        assert rows.shape == (40, 2, 8)
        assert (rows.diff(dim=2) > 0).all()
        assert set(rows.unique().tolist()) == set(range(oldest, STEP - 5))
        assert not torch.equal(rows[:, 0], rows[:, 1])
        assert drawn(view, asked, Protection(3, 5)).equal(rows)
    assert drawn(view, Decompose(pool=16, keep=3), Protection(0, 20)) is None


def test_the_stream_is_the_third_child_of_the_heads_own(traced: Any) -> None:
    """Query head and KV head of one number must not read the same random numbers."""
    _, view = view_of(traced, 0)
    rows = drawn(view, Decompose(samples=5, pool=6, keep=2, seed=3), Protection(1, 2))
    expected = draw(view.stream(3, 1).spawn(3)[2], STEP - 3, 6, 5) + 1
    assert torch.equal(rows[:, 1], expected)


def test_a_policy_keeps_of_a_sub_cache_what_it_scores_highest_there(traced: Any) -> None:
    layer, view = view_of(traced, 0)
    rows = drawn(view, Decompose(samples=6, pool=9, keep=4), Protection(1, 2))
    label, policy = policy_from_text("knorm")
    for choice, tokens in zip(choices(label, policy, layer, view, rows, 4), rows, strict=True):
        assert choice.objective is None
        for head in range(2):
            norms = layer.keys[head, tokens[head]].norm(dim=1)
            assert choice.kept[head].tolist() == norms.argsort()[:4].sort().values.tolist()


def test_weights_are_those_of_the_sub_cache_alone(traced: Any) -> None:
    layer, view = view_of(traced, 0)
    rows = drawn(view, Decompose(samples=2, pool=9, keep=4), Protection(1, 2))
    label, policy = policy_from_text("jacap:tau=1")
    for choice, tokens in zip(choices(label, policy, layer, view, rows, 4), rows, strict=True):
        small = View(layer, STEP, tokens, STEP, torch.full_like(tokens, layer.tokens))
        expected = policy.objective(small)
        assert torch.equal(choice.objective.weights, expected.weights)
        assert choice.objective.weights.shape == (4, 9)
        scores = policy.score(None, small)
        for head in range(2):
            assert choice.kept[head].tolist() == scores[head].argsort(descending=True)[:4].sort().values.tolist()


def test_a_policys_own_protection_holds_in_a_sub_cache(traced: Any) -> None:
    layer, view = view_of(traced, 0)
    rows = drawn(view, Decompose(samples=6, pool=9, keep=4), Protection(1, 2))
    label, policy = policy_from_text("snapkv:window=10")
    for choice, tokens in zip(choices(label, policy, layer, view, rows, 4), rows, strict=True):
        for head in range(2):
            kept = tokens[head][choice.kept[head]]
            newest = tokens[head][tokens[head] >= STEP - 10][-4:]
            assert set(newest.tolist()) <= set(kept.tolist())
