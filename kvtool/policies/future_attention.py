"""Attention that the evaluated steps really pay: what oracles read."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kvtool.errors import KvtoolError
from kvtool.kernels.attention_mass import AttentionBlock, attention_blocks
from kvtool.view import Future, View


def future_attention(view: View, dtype: torch.dtype) -> tuple[Future, Iterator[AttentionBlock]]:
    """Full-cache weights of the evaluated steps over everything visible to them, new tokens included.

    Args:
        dtype: of the weights.

    Raises:
        KvtoolError: code `no-queries` where there is no step to look ahead to.
    """
    future = view.future
    if future.steps.numel() == 0:
        raise KvtoolError(
            "no-queries",
            f"an oracle needs queries at or after step {view.step}, and layer {view.geometry.layer} has none",
            "evict earlier, or capture more tokens",
        )
    layer, geometry = future.layer, view.geometry
    rows = torch.searchsorted(layer.query_steps, future.steps)
    last = int(future.steps.max()) + 1
    blocks = attention_blocks(
        layer.queries[:, rows].to(dtype),
        layer.keys[:, :last],
        steps=future.steps,
        rows=torch.arange(last),
        first_visible=geometry.first_visible(future.steps),
        scale=geometry.scale,
        softcap=geometry.softcap,
        sink_logits=geometry.sink_logits,
    )
    return future, blocks
