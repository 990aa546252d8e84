"""Every policy under every kind of schedule against the dumb loop: the same evictions, the same errors."""

from __future__ import annotations

from fractions import Fraction
from functools import cache

import pytest
import torch
from dumb import Cache, errors, simulate
from formulas import POLICIES
from layers import LAYERS, make

from kvtool.budget import Budget
from kvtool.layer import Layer
from kvtool.metrics import evaluate_layer
from kvtool.policies import ALL, Protection, policy_from_text
from kvtool.replay.decide import run_schedule
from kvtool.replay.rules import Rules
from kvtool.retained import RetainedSet
from kvtool.schedule import parse_schedule

SCHEDULES = (
    "prompt-end",
    "at:9",
    "at:9/after",
    "every:3",
    "every:1,from:0",
    "every:4,from:2/after",
    "high-water:8",
    "high-water:7,from:0/after",
    "prefill:5",
    "prefill:5+every:2",
    "prompt-end+high-water:9/after",
    "every:2,from:0/delay:3",
    "every:3,from:0/block:4",
    "high-water:9,from:3/block:2/after/delay:1",
    "prefill:6/block:3",
)
BUDGETS: dict[int | Fraction, Budget] = {
    6: Budget.from_tokens(6),
    Fraction(1, 3): Budget.from_ratio(Fraction(1, 3)),
    Fraction(4, 5): Budget.from_ratio("0.8"),
}


@cache
def layer_of(name: str) -> Layer:
    return make(name)


def both(
    layer: Layer, text: str, word: str, budget: int | Fraction, sinks: int, window: int, too_slow: bool = False
) -> tuple[RetainedSet, Cache]:
    scores, own = POLICIES[text]
    rules = Rules(parse_schedule(word), Protection(sinks, window), 1e-9 if too_slow else None)
    (found,) = run_schedule(layer, text, policy_from_text(text)[1], [BUDGETS[budget]], rules)
    dumb = simulate(layer, word, budget, scores, sinks=sinks, window=window, own=own, too_slow=too_slow)
    return found, dumb


def expect_same(found: RetainedSet, dumb: Cache, layer: Layer) -> None:
    assert found.evict_step.tolist() == dumb.evict_step()
    assert [event.step for event in found.events] == dumb.events
    since = min([*dumb.events, layer.prompt_length])
    steps = layer.query_steps[layer.query_steps >= since]
    (measured,) = evaluate_layer(layer, [found], steps)
    largest = float(layer.values.abs().max())
    expected = errors(dumb, since)
    for h in dumb.heads:
        for n, t in enumerate(steps.tolist()):
            error, output, mass = expected[h, t]
            assert abs(float(measured.squared_error[h, n]) ** 0.5 - error) <= 1e-12 * largest, (h, t)
            assert abs(float(measured.squared_output[h, n]) ** 0.5 - output) <= 1e-12 * largest, (h, t)
            assert abs(float(measured.mass[h, n]) - mass) <= 1e-12, (h, t)


def test_every_policy_is_here() -> None:
    assert {text.split(":")[0] for text in POLICIES} >= set(ALL) - {"full"}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("text", POLICIES)
def test_policies(text: str, name: str) -> None:
    """Schedules take turns, so that every policy meets every schedule on some layer and every layer meets all."""
    layer, turn = layer_of(name), list(POLICIES).index(text) + 3 * list(LAYERS).index(name)
    for offset in range(0, len(SCHEDULES), len(LAYERS)):
        word = SCHEDULES[(turn + offset) % len(SCHEDULES)]
        budget = list(BUDGETS)[(turn + offset) % len(BUDGETS)]
        found, dumb = both(layer, text, word, budget, sinks=turn % 3, window=offset % 4)
        expect_same(found, dumb, layer)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("word", SCHEDULES)
def test_schedules(word: str, name: str) -> None:
    """The stateful policy and a stateless one under every schedule, on every layer, with every budget."""
    layer = layer_of(name)
    for budget in BUDGETS:
        for text in ("h2o", "tova"):
            found, dumb = both(layer, text, word, budget, sinks=1, window=2)
            expect_same(found, dumb, layer)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("word", [w for w in SCHEDULES if not w.startswith("prompt-end/")])
def test_an_impossible_deadline_is_a_sliding_window(word: str, name: str) -> None:
    layer = layer_of(name)
    found, dumb = both(layer, "h2o", word, 6, sinks=2, window=1, too_slow=True)
    expect_same(found, dumb, layer)
    evicting = [e for e in found.events if bool((e.found > e.achieved).any())]
    assert all(bool((e.fallback == 2).all()) for e in evicting)
    assert torch.equal(
        found.evict_step < layer.tokens, (found.evict_step < layer.tokens)[:1].expand_as(found.evict_step)
    )
