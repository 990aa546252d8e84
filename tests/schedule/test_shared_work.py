"""What the budgets of one policy share is done once, and changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from layers import make
from torch import Tensor

from kvtool.budget import Budget
from kvtool.policies import Policy, Protection, attention_history, policy_from_text
from kvtool.replay import choose
from kvtool.replay.decide import run_schedule
from kvtool.replay.rules import Rules
from kvtool.retained import RetainedSet
from kvtool.schedule import parse_schedule
from kvtool.view import View

RATIOS = [Budget.from_ratio(ratio) for ratio in ("0.3", "0.5", "0.6", "0.7", "0.8")]
RANKED = ("knorm", "tova", "snapkv:window=3,kernel=3", "observed-attention", "keydiff", "lagkv:lag=4", "random")


def decided(text: str, budgets: list[Budget], word: str = "at:17", kind: str = "full") -> list[RetainedSet]:
    layer, policy = make(kind, 24), policy_from_text(text)[1]
    return run_schedule(layer, text, policy, budgets, Rules(parse_schedule(word), Protection(1, 2)))


def all_of(found: RetainedSet) -> list[Any]:
    said = [
        (e.step, e.achieved, e.ties, e.margin, e.relative_margin, e.near, e.ranking, e.overfull, e.fallback)
        for e in found.events
    ]
    return [found.digest(), repr(said)]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    calls: Counter[str] = Counter()
    inner = choose.rank

    def rank(*args: Any, **options: Any) -> Any:
        calls["rank"] += 1
        return inner(*args, **options)

    monkeypatch.setattr(choose, "rank", rank)
    return calls


@pytest.mark.parametrize("word", ["at:17", "every:3,from:9", "high-water:11/after", "at:17/block:2"])
@pytest.mark.parametrize("text", [*RANKED, "h2o", "keydiff:recent=0.3", "streaming-llm:sinks=2"])
def test_budgets_together_are_budgets_alone(text: str, word: str) -> None:
    for kind in ("full", "sliding"):
        together = decided(text, RATIOS, word, kind)
        alone = [decided(text, [budget], word, kind)[0] for budget in RATIOS]
        assert [found.digest() for found in together] == [found.digest() for found in alone]
        if word != "at:17":  # alone, every policy's one protection is the same for all its budgets
            assert [all_of(found) for found in together] == [all_of(found) for found in alone]


@pytest.mark.parametrize("text", RANKED)
def test_one_ranking_serves_all_budgets(text: str, counted: Counter[str]) -> None:
    found = decided(text, RATIOS)
    assert counted["rank"] == 1
    rankings = [one.events[0].ranking for one in found]
    assert all(ranking is not None and torch.equal(ranking, rankings[0]) for ranking in rankings)


def test_protection_by_budget_is_ranked_by_budget(counted: Counter[str]) -> None:
    found = decided("h2o", RATIOS)
    assert counted["rank"] == len({one.events[0].window for one in found}) > 1


def counting(name: str, inner: Callable[..., Any], calls: Counter[str]) -> Callable[..., Any]:
    def asked(self: Policy, *args: Any) -> Any:
        calls[name] += 1
        return inner(self, *args)

    return asked


@pytest.mark.parametrize("text", [*RANKED, "h2o", "expected-attention", "jacap"])
def test_score_and_observe_are_asked_once(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, policy = make("full", 24), policy_from_text(text)[1]
    calls: Counter[str] = Counter()
    for name in ("score", "observe"):
        monkeypatch.setattr(type(policy), name, counting(name, getattr(type(policy), name), calls))
    found = run_schedule(layer, text, policy, RATIOS, Rules(parse_schedule("at:17"), Protection(1, 2)))
    assert len({one.digest() for one in found}) == len(RATIOS)
    assert calls == {"score": 1, "observe": 1}


@pytest.mark.parametrize("word", ["at:17", "every:3,from:9"])
def test_policies_share_the_history_of_an_untouched_cache(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []
    inner = attention_history._extended

    def extended(history: Tensor, view: View) -> Tensor:
        calls.append((view.start, view.step))
        return inner(history, view)

    monkeypatch.setattr(attention_history, "_extended", extended)
    layer, rules, shared = make("sliding", 24), Rules(parse_schedule(word), Protection(1, 2)), {}
    for text in ("h2o", "observed-attention", "h2o:recent=0.2"):
        policy = policy_from_text(text)[1]
        found = run_schedule(layer, text, policy, RATIOS, rules, shared=shared)
        alone = run_schedule(layer, text, policy, RATIOS, rules)
        assert [one.digest() for one in found] == [one.digest() for one in alone]
    first = [call for call in calls if call[0] == 0]
    assert len(set(first)) == 1
    assert len(first) == 1 + 3  # once for the three that share, and for each alone


def test_measured_times_are_of_a_policy_alone() -> None:
    layer, shared = make("full", 24), {}
    rules = Rules(parse_schedule("at:17"), Protection(1, 2), telemetry=True)
    found = run_schedule(layer, "h2o", policy_from_text("h2o")[1], RATIOS, rules, shared=shared)
    assert shared == {}
    assert found[0].events[0].seconds["scoring"] > 0
