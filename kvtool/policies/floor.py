"""Floor: what a token has meant to earlier queries, mixed into weights that know only the expected one."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from kvtool.kernels.attention_mass import attention_blocks
from kvtool.view import View

FloorKind = Literal["history", "leave_one_out"]


def blended(weights: Tensor, floor: Tensor, blend: float) -> Tensor:
    """[n]: blend·w + (1 - blend)·W·g / sum g with W = sum w, so that the total weight stays.

    A floor that is 0 everywhere prefers nobody: it counts as even.

    Args:
        weights: [n] float64, >= 0.
        floor: [n] float64, >= 0.
    """
    total = floor.sum()
    share = floor / total if bool(total > 0) else torch.full_like(floor, 1 / max(1, len(floor)))
    return blend * weights + (1 - blend) * weights.sum() * share


def leave_one_out(view: View) -> Tensor:
    """[H, N] float64, squared output error that the past queries would suffer if the token alone were missing.

    sum over t of (a / (1 - a))^2 |v - f|^2, the softmax of each query over the candidates it can see
    (CAOTE, 2504.14051, over all past queries). A token that is all a query sees takes the whole
    output with it: |v|^2.
    """
    geometry = view.geometry
    steps = torch.arange(view.step)
    blocks = attention_blocks(
        view.queries(0, view.step).to(torch.float64),
        view.keys,
        steps=steps,
        rows=view.tokens,
        first_visible=geometry.first_visible(steps),
        scale=geometry.scale,
        softcap=geometry.softcap,
        sink_logits=geometry.sink_logits,
    )
    damage = torch.zeros(geometry.query_heads, view.tokens.shape[1], dtype=torch.float64)
    values = view.values.to(torch.float64)
    for block in blocks:
        v = values[:, block.columns]  # [Hk, n, Dv]
        if v.shape[1] == 0:
            continue  # none of these queries sees a candidate
        a = block.weights.reshape(geometry.kv_heads, -1, v.shape[1])  # [Hk, G*b, n]
        f = a @ v
        distance = v.square().sum(2)[:, None, :] - 2 * f @ v.transpose(1, 2) + f.square().sum(2, keepdim=True)
        # where one token has nearly all the weight, f is nearly its value: the difference itself is exact
        top = a.argmax(2, keepdim=True)
        at_top = v.gather(1, top.expand(-1, -1, v.shape[2]))
        distance.clamp_min_(0).scatter_(2, top, (at_top - f).square().sum(2, keepdim=True))
        alone = a >= 1
        loss = torch.where(
            alone, v.square().sum(2)[:, None, :], (a / (1 - a).masked_fill(alone, 1)).square() * distance
        )
        damage[:, block.columns] += loss.view(block.weights.shape).sum(1)
    return damage
