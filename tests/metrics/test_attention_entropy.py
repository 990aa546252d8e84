"""Entropy of attention against a loop over tokens."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from kvtool.layer import Layer
from kvtool.metrics import attention_entropy as module
from kvtool.metrics.attention_entropy import attention_entropy

TOKENS = 41


def a_layer(**options: Any) -> Layer:
    g = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(heads, TOKENS, 7, generator=g, dtype=torch.float64) for heads in (4, 2, 2))
    return Layer.from_arrays(q, k, v, prompt_length=20, scale=0.6, dtype=torch.float64, **options)


def looped(layer: Layer, evict: torch.Tensor, step: int) -> float:
    geometry, found = layer.geometry, []
    for head in range(4):
        kv = head // 2
        weights = []
        for token in range(step + 1):
            if token < int(geometry.first_visible(torch.tensor(step))) or step >= int(evict[kv, token]):
                continue
            z = geometry.scale * float(layer.queries[head, step] @ layer.keys[kv, token])
            if geometry.softcap is not None:
                z = geometry.softcap * math.tanh(z / geometry.softcap)
            weights.append(math.exp(z))
        total = sum(weights)
        found.append(-sum(w / total * math.log(w / total) for w in weights))
    return sum(found) / 4


@pytest.mark.parametrize(
    "options", [{}, {"window": 9}, {"softcap": 1.5}, {"sink_logits": torch.tensor([1.0, -2.0, 5.0, 0.0])}]
)
def test_entropy_equals_a_loop_for_every_cell(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    layer = a_layer(**options)
    runs = [torch.full((2, TOKENS), TOKENS, dtype=torch.int32) for _ in range(2)]
    runs[1][0, 3:15], runs[1][1, 8:25] = 26, 31
    wanted = [[25, 30], [25, 26, 30, 40]]
    for tile in (module.TILE_BYTES, 1):  # at once, and step by step
        monkeypatch.setattr(module, "TILE_BYTES", tile)
        for evict, steps, found in zip(runs, wanted, attention_entropy(layer, runs, wanted), strict=True):
            assert list(found) == steps
            for step in steps:
                assert found[step] == pytest.approx(looped(layer, evict, step), rel=1e-12)


def test_a_query_that_is_not_stored_has_no_entropy() -> None:
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 2, 4, generator=g), torch.randn(1, 9, 4, generator=g)
    layer = Layer.from_arrays(q, k, k, prompt_length=7, scale=1.0, query_steps=torch.tensor([7, 8]))
    evict = torch.full((1, 9), 9, dtype=torch.int32)
    assert set(attention_entropy(layer, [evict], [[6, 7]])[0]) == {7}
    assert attention_entropy(layer, [evict], [[6]]) == [{}]
