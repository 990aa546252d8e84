"""A KV head whose matrix has no factor keeps the sliding window at that event, and only that head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from dumb import Cache, simulate
from layers import LAYERS, make
from torch import Tensor

from kvtool.budget import Budget
from kvtool.policies import Policy, Protection
from kvtool.replay.decide import run_schedule
from kvtool.replay.rules import Rules
from kvtool.retained import FACTORISATION
from kvtool.schedule import parse_schedule
from kvtool.view import View


@dataclass(frozen=True)
class Stumbling(Policy):
    """Scores by the first channel of the values; at every third step one query head's matrix has no factor."""

    head: int = 0

    def score(self, state: Any, view: View) -> Tensor:
        return view.values[..., 0]

    def diagnose(self, state: Any, view: View) -> dict[str, Tensor]:
        failed = torch.zeros(view.geometry.query_heads, dtype=torch.float64)
        failed[self.head] = float(view.step % 3 == 0)
        return {"fallback": failed}


@pytest.mark.parametrize("word", ["every:1,from:4", "every:2/after", "prefill:3", "every:3,from:0/delay:2"])
@pytest.mark.parametrize("name", LAYERS)
def test_the_window_stands_in_for_that_head_and_event(name: str, word: str) -> None:
    layer = make(name)
    last = layer.geometry.query_heads - 1
    stumbling = last // layer.geometry.group

    def scores(cache: Cache, e: int, g: int, rows: list[int]) -> list[float]:
        window = g == stumbling and e % 3 == 0
        return [float(i) if window else cache.v[g][i][0] for i in rows]

    rules = Rules(parse_schedule(word), Protection(1, 1))
    (found,) = run_schedule(layer, "p", Stumbling(last), [Budget.from_tokens(5)], rules)
    dumb = simulate(layer, word, 5, scores, sinks=1, window=1)
    assert found.evict_step.tolist() == dumb.evict_step()
    for event in found.events:
        due = event.step % 3 == 0 and bool((event.found > 5).any())
        expected = [FACTORISATION if due and g == stumbling else 0 for g in range(layer.geometry.kv_heads)]
        assert event.fallback.tolist() == expected


def test_a_single_event_keeps_the_declared_fallback() -> None:
    layer = make("full")
    rules = Rules(parse_schedule("at:15"), Protection())
    (found,) = run_schedule(layer, "p", Stumbling(), [Budget.from_tokens(5)], rules)
    dumb = simulate(layer, "at:15", 5, lambda cache, e, g, rows: [cache.v[g][i][0] for i in rows])
    assert found.evict_step.tolist() == dumb.evict_step()
    assert found.events[0].fallback.tolist() == [0, 0]
