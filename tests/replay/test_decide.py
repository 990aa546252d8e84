"""One event: candidates, protection, exact budgets, ties, broken policies, and the wall to the future."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kvtool.budget import Budget
from kvtool.errors import KvtoolError
from kvtool.layer import Kind, Layer
from kvtool.policies import Policy, Protection
from kvtool.replay.decide import decide
from kvtool.retained import RetainedSet
from kvtool.view import View


@dataclass(frozen=True)
class ByValue(Policy):
    """Scores are the first channel of the values."""

    def score(self, state: None, view: View) -> Tensor:
        return view.values[..., 0]


@dataclass(frozen=True)
class Oldest(Policy):
    """Keeps the oldest."""

    def score(self, state: None, view: View) -> Tensor:
        return -view.tokens.to(view.dtype)


@dataclass(frozen=True)
class Constant(Policy):
    """All equal."""

    def score(self, state: None, view: View) -> Tensor:
        return torch.ones(view.tokens.shape)


def make_layer(tokens: int = 24, kind: Kind = "full", window: int | None = None) -> Layer:
    make = torch.Generator().manual_seed(5)
    return Layer.from_arrays(
        torch.randn(4, tokens, 8, generator=make),
        torch.randn(2, tokens, 8, generator=make),
        torch.randn(2, tokens, 6, generator=make),
        prompt_length=16,
        scale=0.3,
        kind=kind,
        window=window,
        sink_logits=torch.zeros(4),
    )


def run(layer: Layer, policy: Policy, budgets: list[Budget], sinks: int = 0, window: int = 0) -> list[RetainedSet]:
    ahead = torch.arange(16, layer.tokens)
    return decide(layer, "p", policy, budgets, 16, Protection(sinks, window), ahead)


def test_keeps_the_best_scores_exactly() -> None:
    layer = make_layer()
    (retained,) = run(layer, ByValue(), [Budget.from_tokens(5)])
    for head in range(2):
        expected = sorted(sorted(range(16), key=lambda i: -float(layer.values[head, i, 0]))[:5])
        kept = [i for i in range(16) if retained.evict_step[head, i] == 24]
        assert kept == expected
        assert [int(s) for s in retained.evict_step[head] if s != 24] == [16] * 11
    assert retained.evict_step.dtype == torch.int32
    assert retained.events[0].achieved.tolist() == [5, 5]


def test_budgets_share_one_ranking_and_are_nested() -> None:
    budgets = [Budget.from_ratio(r) for r in ("0", "0.5", "0.8", "0.99")]
    sets = run(make_layer(), ByValue(), budgets, sinks=2, window=3)
    masks = [s.retained(20) for s in sets]
    assert [int(m[0, :16].sum()) for m in masks] == [16, 8, 4, 1]
    for larger, smaller in itertools.pairwise(masks):
        assert bool((larger | ~smaller).all())
    assert all(torch.equal(s.events[0].ranking, sets[0].events[0].ranking) for s in sets)
    assert [s.events[0].overfull for s in sets] == [False, False, True, True]


def test_protection_is_a_mask_and_not_a_score() -> None:
    (retained,) = run(make_layer(), Oldest(), [Budget.from_tokens(6)], sinks=1, window=3)
    assert retained.retained(16)[0, :16].nonzero()[:, 0].tolist() == [0, 1, 2, 13, 14, 15]


def test_ties_keep_the_newer_and_are_counted() -> None:
    (retained,) = run(make_layer(), Constant(), [Budget.from_tokens(4)])
    assert retained.retained(16)[1, :16].nonzero()[:, 0].tolist() == [12, 13, 14, 15]
    assert retained.events[0].ties.tolist() == [16, 16]


def test_windowed_layers_only_offer_what_they_still_see() -> None:
    layer = make_layer(kind="sliding", window=7)
    kept_all, half = run(layer, ByValue(), [Budget.from_tokens(7), Budget.from_ratio("0.5")])
    assert bool((kept_all.evict_step == 24).all())  # budget >= candidates: error 0, nothing evicted
    assert half.events[0].candidates.tolist() == [list(range(10, 16))] * 2
    assert (half.evict_step[:, :10] == 24).all()  # outside the window nothing is "evicted"
    assert (half.evict_step[:, 10:16] == 16).sum(1).tolist() == [3, 3]


def test_budget_beyond_candidates_keeps_everything() -> None:
    for budget in (Budget.from_tokens(16), Budget.from_tokens(999), Budget.from_ratio("0")):
        (retained,) = run(make_layer(), ByValue(), [budget])
        assert bool((retained.evict_step == 24).all())


@pytest.mark.parametrize("poison", [1.0, 1e30, float("nan")])
def test_decisions_do_not_see_the_future(poison: float) -> None:
    layer = make_layer()
    queries, keys, values = layer.queries.clone(), layer.keys.clone(), layer.values.clone()
    queries[:, 16:], keys[:, 16:], values[:, 16:] = poison, poison, poison
    other = Layer.from_arrays(queries, keys, values, prompt_length=16, scale=0.3)
    for policy in (ByValue(), Oldest()):
        budgets = [Budget.from_tokens(3), Budget.from_tokens(9)]
        first, second = run(layer, policy, budgets), run(other, policy, budgets)
        assert [s.digest() for s in first] == [s.digest() for s in second]


@dataclass(frozen=True)
class Broken(Policy):
    """Broken in the way that `how` says."""

    how: str = "nan"

    def score(self, state: None, view: View) -> Tensor:
        scores = torch.zeros(view.tokens.shape)
        if self.how == "nan":
            scores[1, 3] = float("nan")
        elif self.how == "shape":
            scores = scores[:, 1:]
        elif self.how == "integers":
            scores = scores.to(torch.int64)
        elif self.how == "future":
            return view.future.layer.values[..., 0]
        elif self.how == "half":
            scores = scores.to(torch.float16)
        elif self.how == "raises":
            raise IndexError("list index\nout of range")
        elif self.how == "exits":
            raise SystemExit(0)
        elif self.how == "writes keys":
            view.keys.mul_(2)
        elif self.how == "writes queries":
            view.queries(3, 5).zero_()
        elif self.how == "writes sinks" and view.geometry.sink_logits is not None:
            view.geometry.sink_logits.fill_(9.0)
        elif self.how == "negative row":
            view.positions(torch.tensor([-1]))
        return scores

    def protection(self, budget: int) -> Protection:
        return Protection(sinks=-1) if self.how == "protects -1" else Protection()

    def diagnose(self, state: None, view: View) -> dict[str, Tensor]:
        if self.how == "takes a column":
            return {"output_error": torch.zeros(4)}
        return {"odd": torch.zeros(3)} if self.how == "odd diagnosis" else {}


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("nan", "p gave NaN at layer 0, KV head 1, step 16, token 3"),
        ("shape", r"scores \[2, 15\] at layer 0, expected \[2, 16\]"),
        ("integers", "torch.int64 scores"),
        ("half", "torch.float16 scores"),
        ("raises", "p failed at layer 0: IndexError: list index out of range"),
        ("exits", "p failed at layer 0: SystemExit"),
        ("writes keys", "changed what it was shown"),
        ("writes queries", "changed what it was shown"),
        ("writes sinks", "changed what it was shown"),
        ("negative row", "rows count from 0"),
        ("protects -1", "cannot be negative"),
        ("takes a column", "a column already"),
        ("odd diagnosis", "something other than named numbers"),
        ("future", "oracle = True"),
    ],
)
def test_broken_policies_are_named(how: str, said: str) -> None:
    with pytest.raises(KvtoolError, match=said) as caught:
        run(make_layer(), Broken(how), [Budget.from_tokens(4)])
    assert caught.value.code == "policy-broken"


def test_one_lane_off_changes_the_digest() -> None:
    (retained,) = run(make_layer(), ByValue(), [Budget.from_tokens(5)])
    moved = retained.evict_step.clone()
    moved[1, 7] = 16 if moved[1, 7] == 24 else 24
    assert RetainedSet(moved).digest() != retained.digest()
    assert RetainedSet(retained.evict_step.clone()).digest() == retained.digest()
