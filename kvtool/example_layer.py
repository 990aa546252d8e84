"""A layer made of random numbers, for tests of policies and metrics."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from kvtool.layer import Gradients, Kind, Layer
from kvtool.rotation import Rotation


def example_layer(
    tokens: int = 48,
    *,
    seed: int = 0,
    query_heads: int = 4,
    kv_heads: int = 2,
    key_dim: int = 8,
    value_dim: int = 6,
    stored: torch.dtype = torch.float32,
    dtype: torch.dtype = torch.float32,
    rotation: Literal["half", "interleaved", "none"] = "half",
    kind: Kind = "full",
    window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    mean_query: float = 0.5,
) -> Layer:
    """A random layer with every optional array, queries of all rows, no two tokens alike.

    Args:
        stored: what the data are rounded to before they are computed with in `dtype`.
        rotation: layout, the first half of the channels being rotated.
        mean_query: offset of the queries, so that their mean says something.
    """
    stream = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=stream, dtype=torch.float64)

    queries = normal(query_heads, tokens, key_dim) + mean_query * normal(query_heads, 1, key_dim)
    rotary = key_dim // 2
    return Layer.from_arrays(
        queries.to(stored),
        normal(kv_heads, tokens, key_dim).to(stored),
        (normal(kv_heads, tokens, value_dim) + 0.3).to(stored),
        prompt_length=max(1, tokens - 8),
        scale=0.4,
        layer=3,
        positions=torch.arange(tokens) + 5,
        output_projection=normal(query_heads, value_dim, 10).to(stored),
        softcap=softcap,
        kind=kind,
        window=window,
        sink_logits=normal(query_heads).to(torch.float32) if sinks else None,
        rotation="none"
        if rotation == "none"
        else Rotation(rotary, rotation, 100.0 ** (-torch.arange(0, rotary, 2) / rotary)),
        prompt_digest=f"{seed:064x}",
        dtype=dtype,
        # every step is a block of its own: no gradient knows a later step
        output_gradients=(0.1 * normal(2, query_heads, tokens, value_dim)).to(stored),
        gradient_steps=torch.arange(tokens),
        gradients=Gradients(draws=2, block=1, at="all", targets=(0, tokens), steps=tokens, seed=seed),
    )
