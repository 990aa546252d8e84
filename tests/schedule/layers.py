"""Small float64 layers that differ in everything a schedule could trip over."""

from __future__ import annotations

from typing import Any

import torch

from kvtool.example_layer import example_layer
from kvtool.layer import Layer

LAYERS: dict[str, dict[str, Any]] = {
    "full": {"seed": 1},
    "no groups, softcap": {"seed": 2, "query_heads": 2, "kv_heads": 2, "softcap": 0.9},
    "groups of 4, sinks": {"seed": 3, "query_heads": 4, "kv_heads": 1, "sinks": True, "rotation": "none"},
    "sliding": {"seed": 4, "kind": "sliding", "window": 9, "sinks": True},
    "chunked": {"seed": 5, "kind": "chunked", "window": 7, "rotation": "interleaved"},
}


def make(name: str, tokens: int = 26, prompt: int | None = None) -> Layer:
    """A layer of LAYERS; the prompt is all but the last 8 rows unless given."""
    options = {"query_heads": 4, "kv_heads": 2, "key_dim": 4, "value_dim": 3} | LAYERS[name]
    layer = example_layer(tokens, stored=torch.float64, dtype=torch.float64, **options)
    object.__setattr__(layer, "prompt_length", layer.prompt_length if prompt is None else prompt)
    return layer
