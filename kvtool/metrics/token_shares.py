"""Token shares: which evicted tokens the predicted KL comes from."""

from __future__ import annotations

import torch
from torch import Tensor

from kvtool.kernels.retained_attention.token_parts import evicted_token_dots
from kvtool.layer import Layer
from kvtool.metrics.predicted_kl import Whole
from kvtool.shapes import expect_shapes


def token_shares(layer: Layer, evict_step: Tensor, whole: Whole, event: int) -> Tensor:
    """Every token's part of predicted_kl, through delta = 1/(1-m) · sum over evicted i of a_i (f_V - v_i).

    Shares of one layer add up to the layer's share and may be negative: evicting a token beside
    others may undo part of what they did.

    Args:
        evict_step: [Hk, T] of the cell.
        whole: the cell's g·delta over all layers, since every part is weighed by it.
        event: the step before which tokens were evicted; earlier steps are not evaluated.

    Returns:
        [Hk, T] nats per step, summed over the group's query heads; 0 for tokens that stayed.
    """
    geometry, known, gradients = layer.geometry, layer.gradient_steps, layer.output_gradients
    expect_shapes(evict_step=(evict_step, f"{geometry.kv_heads} {layer.tokens}"))
    if known is None or gradients is None:
        return torch.zeros(geometry.kv_heads, layer.tokens, dtype=torch.float64)
    query_at = torch.searchsorted(layer.query_steps, known).clamp_max(layer.query_steps.numel() - 1)
    usable = (known >= event) & (layer.query_steps[query_at] == known)
    steps = known[usable]
    weight = whole.at(steps) / (2 * whole.steps * whole.dot.shape[0])  # [S, n]
    directions = torch.einsum("shnd,sn->hnd", gradients[:, :, usable], weight.to(gradients.dtype))
    dots: Tensor = evicted_token_dots(
        layer.queries[:, query_at[usable]],
        layer.keys,
        layer.values,
        evict_step,
        directions,
        steps=steps,
        rows=torch.arange(layer.tokens),
        first_visible=geometry.first_visible(steps),
        scale=geometry.scale,
        softcap=geometry.softcap,
        sink_logits=geometry.sink_logits,
    )
    by_head = dots.to(torch.float64).view(geometry.kv_heads, geometry.group, -1)
    return by_head.sum(1)
