"""What the newest queries attend to, as SnapKV and TOVA observe it."""

from __future__ import annotations

import torch
from torch import Tensor

from kvtool.kernels.attention_mass import attention_mass
from kvtool.view import View


def recent_attention(view: View, count: int) -> tuple[Tensor, int]:
    """Attention of the last `count` queries to the candidates, summed over these queries.

    The softmax of each query runs over the candidates it can see (causal, inside the layer's
    window), so columns that a policy drops later still take their share.

    Returns:
        [H, N] float64, and how many queries there were (fewer than `count` near the start).
    """
    first = max(0, view.step - count)
    steps = torch.arange(first, view.step)
    geometry = view.geometry
    mass = attention_mass(
        view.queries(first, view.step),
        view.keys,
        steps=steps,
        rows=view.tokens,
        first_visible=geometry.first_visible(steps),
        scale=geometry.scale,
        softcap=geometry.softcap,
        sink_logits=geometry.sink_logits,
    )
    return mass, view.step - first
