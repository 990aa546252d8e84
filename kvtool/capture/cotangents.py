"""Cotangents: random vectors at the logits whose second moment is the Fisher information of the next token.

With p the model's next-token distribution, diag(p) - p p^T is the Fisher information at the logits. Two
kinds of random vector have mean 0 and that covariance, so backpropagating either estimates the same thing:

* `tokens`: onehot(y) - p with y drawn from p, the gradient of log p(y). A model that is nearly certain
  draws the same token nearly always, and the little information that there is hides in rare draws.
* `signs`: sqrt(p)·x - p·(sqrt(p)·x) with random signs x over the vocabulary (the estimator of Hutchinson,
  1989, on the square root of the Fisher information). Every draw asks every token, so far fewer suffice.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

Probe = Literal["signs", "tokens"]
PROBES: tuple[Probe, ...] = ("signs", "tokens")


def cotangents(probe: Probe, logits: Tensor, uniforms: Tensor) -> Iterator[Tensor]:
    """One cotangent [n, V] per draw, in the logits' dtype; softmax and differences are in float64.

    Args:
        logits: [n, V], one row per target step; its graph is not followed.
        uniforms: [S, n] float64 in [0, 1), one number a draw and step, which alone decides the draw.
    """
    logits = logits.detach()
    for numbers in uniforms:
        found = torch.empty_like(logits)
        for row, (values, number) in enumerate(zip(logits, numbers.tolist(), strict=True)):
            p = values.to(torch.float64).softmax(-1)
            found[row] = _signs(p, number) if probe == "signs" else _token(p, number)
        yield found


def _signs(p: Tensor, number: float) -> Tensor:
    """[V]"""
    generator = torch.Generator().manual_seed(int(number * 2**53))
    signs = 1 - 2 * torch.randint(0, 2, p.shape, generator=generator, dtype=torch.int8)
    drawn = p.sqrt() * signs
    return drawn - p * drawn.sum()


def _token(p: Tensor, number: float) -> Tensor:
    """[V], the token picked by the distribution function."""
    token = pick(p, number)
    found = -p
    found[token] = 1 - p[token]
    return found


def pick(p: Tensor, number: float) -> int:
    """The token at which the distribution function of `p` [V] passes `number`."""
    reached = p.cumsum(-1)
    return int(torch.searchsorted(reached, number * reached[-1], right=True).clamp_max(p.numel() - 1))
