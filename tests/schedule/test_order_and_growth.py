"""Before or after the attention of the step that is due, and a cache that grows again: two curves from evict_step."""

from __future__ import annotations

import pytest
import torch
from layers import LAYERS

from kvtool.budget import Budget
from kvtool.example_layer import example_layer
from kvtool.layer import Layer
from kvtool.metrics import evaluate_layer
from kvtool.policies import Protection, policy_from_text
from kvtool.replay.decide import run_schedule
from kvtool.replay.rules import Rules
from kvtool.retained import RetainedSet
from kvtool.schedule import parse_schedule

POLICIES = ("knorm", "h2o", "tova", "keydiff", "random", "streaming-llm:sinks=1")


def run(layer: Layer, text: str, word: str, budget: int) -> RetainedSet:
    rules = Rules(parse_schedule(word), Protection())
    return run_schedule(layer, text, policy_from_text(text)[1], [Budget.from_tokens(budget)], rules)[0]


@pytest.mark.parametrize("text", POLICIES)
@pytest.mark.parametrize("word", ["at:5", "every:1,from:5", "high-water:5,from:5"])
def test_before_and_after_the_fifth_step(text: str, word: str) -> None:
    """Rows 0..4 are cached, 4 may stay, an event is due at step 5: before its attention, that step errs already;
    after it, step 5 is exact and step 6 is the first to err."""
    layer = example_layer(9, seed=4, stored=torch.float64, dtype=torch.float64)
    object.__setattr__(layer, "prompt_length", 5)
    steps = torch.arange(layer.tokens)
    before, after = (run(layer, text, word + order, 4) for order in ("", "/after"))
    found = [errors.squared_error for errors in evaluate_layer(layer, [before, after], steps)]
    assert bool((found[0][:, :5] == 0).all())
    assert bool((found[0][:, 5] > 0).all())
    assert bool((found[1][:, :6] == 0).all())
    assert bool((found[1][:, 6] > 0).all())
    assert [one.events[0].step for one in (before, after)] == [5, 6]


@pytest.mark.parametrize("text", POLICIES)
@pytest.mark.parametrize("name", ["full", "groups of 4, sinks"])
def test_evicting_once_lets_the_cache_grow_again(text: str, name: str) -> None:
    """Budget 32, prompt 100, 200 decode steps. What is stored peaks at 232 where only the prompt's end evicts, and
    stays at 33 before and 32 behind each event where every step does."""
    layer = example_layer(300, **{"key_dim": 4, "value_dim": 3} | LAYERS[name])
    object.__setattr__(layer, "prompt_length", 100)

    def stored(retained: RetainedSet, step: int) -> list[int]:
        """Per KV head the tokens in the cache once row `step` was appended and its query answered."""
        return retained.retained(step).sum(1).tolist()

    once, always = run(layer, text, "prompt-end", 32), run(layer, text, "every:1", 32)
    heads = layer.geometry.kv_heads
    grown = [stored(once, step) for step in range(100, 300)]
    assert grown == [[33 + n] * heads for n in range(200)]
    assert max(map(max, grown)) == 232
    assert [stored(always, step) for step in range(100, 300)] == [[33] * heads] * 200
    behind = [(always.evict_step[:, :step] > step).sum(1).tolist() for step in range(100, 300)]
    assert behind == [[32] * heads] * 200  # what the event before each step left
    assert [stored(always, step) for step in (0, 50, 99)] == [[1] * heads, [51] * heads, [100] * heads]
    assert len(always.events) == 200
    assert {int(event.found[0]) for event in always.events[1:]} == {33}
    assert {int(event.achieved[0]) for event in always.events} == {32}
