"""LagKV judges partitions that nothing left yet all at once: that must be what it says of each alone."""

from __future__ import annotations

import pytest
import torch

from kvtool.example_layer import example_layer
from kvtool.policies import lagkv
from kvtool.policies.lagkv import LagKV
from kvtool.view import View


@pytest.mark.parametrize("ranking", [True, False])
@pytest.mark.parametrize("start", [0, 30])
@pytest.mark.parametrize("flat", [False, True])
def test_all_at_once_is_one_by_one(ranking: bool, start: int, flat: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = example_layer(63, seed=5)
    if flat:  # a channel without a range
        layer.keys[1, 20:45, 0] = 1.0
    policy = LagKV(sinks=3, lag=7, ranking=ranking)

    def judged() -> torch.Tensor:
        state = policy.start(layer.geometry)
        for begin, end in [(0, start), (start, 60)] if start else [(0, 60)]:
            tokens = torch.arange(end).expand(layer.geometry.kv_heads, -1)
            state = policy.observe(state, View(layer, end, tokens, begin, torch.full_like(tokens, layer.tokens)))
        return state

    monkeypatch.setattr(lagkv, "TOGETHER", 3)
    together = judged()
    monkeypatch.setattr(lagkv, "_untouched", lambda view: False)
    alone = judged()
    assert torch.equal(together, alone)
    assert int(together.isfinite().sum()) == layer.geometry.kv_heads * 7 * 7
