"""Quadratic forms of many vectors under a few matrices."""

from __future__ import annotations

import torch
from torch import Tensor

TILE = 1024  # vectors at a time: memory that is fresh for every product costs as much as the product


def quadratic_forms(vectors: Tensor, matrices: Tensor) -> Tensor:
    """[g, N], x^T M x of `vectors` [N, D] under every one of `matrices` [g, D, D], each symmetric. O(g·N·D^2)."""
    count, dim = vectors.shape
    stacked = matrices.reshape(-1, dim).T.contiguous()  # [D, g·D]
    found = vectors.new_empty(len(matrices), count)
    room = vectors.new_empty(min(TILE, count), stacked.shape[1])
    for start in range(0, count, TILE):
        part = vectors[start : start + TILE]
        product = room[: len(part)]
        torch.mm(part, stacked, out=product)
        forms = product.view(len(part), len(matrices), dim).mul_(part[:, None])
        found[:, start : start + TILE] = forms.sum(2).T
    return found
