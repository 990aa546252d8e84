"""Weights of the capacity policies: how much a token's response to the query moves the output."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Relevance = Literal["softmax", "exp_dot", "exp_cosine", "ones"]
Shift = Literal["max", "none"]
Response = Literal["diagonal", "full", "none"]


def logits_and_slope(keys: Tensor, mean: Tensor, scale: float, softcap: float | None) -> tuple[Tensor, Tensor]:
    """Logit at the mean query, softcapped, and its derivative by the raw logit: each [n].

    Args:
        keys: [n, D].
        mean: [D].
    """
    z = scale * (keys @ mean)
    if softcap is None:
        return z, torch.ones_like(z)
    z = softcap * torch.tanh(z / softcap)
    return z, 1 - (z / softcap) ** 2


def relevance(
    kind: Relevance, keys: Tensor, mean: Tensor, z: Tensor, *, tau: float, shift: Shift, sink_logit: float | None
) -> Tensor:
    """[n], how much the mean query concerns itself with each token.

    `softmax` is attention at temperature tau, a sink logit in its denominator; the others are
    exp(tau·z), exp(tau·cosine) and 1. Their maximum is subtracted with `shift="max"`, which
    changes ranks under a fixed ridge.
    """
    if kind == "softmax":
        total = torch.logsumexp(z / tau, dim=0)
        if sink_logit is not None:
            total = torch.logaddexp(total, torch.tensor(sink_logit / tau, dtype=z.dtype))
        return torch.exp(z / tau - total)
    if kind == "ones":
        return torch.ones_like(z)
    if kind == "exp_dot":
        exponent = tau * z
    else:
        unit = torch.nn.functional.normalize(keys, dim=-1) @ torch.nn.functional.normalize(mean, dim=0)
        exponent = tau * unit.clamp(-1.0, 1.0)
    return torch.exp(exponent - exponent.max() if shift == "max" else exponent)


def response_variance(keys: Tensor, slope: Tensor, covariance: Tensor, response: Response) -> Tensor:
    """[n], variance of the logit per squared scale: k~^T covariance k~ with k~ = slope·k.

    Args:
        covariance: [D, D]; `diagonal` reads its diagonal only.
    """
    if response == "diagonal":
        spread = keys.square() @ covariance.diagonal()
    else:
        spread = ((keys @ covariance) * keys).sum(1)
    return slope.square() * spread.clamp_min(0)  # rounding must not make a weight negative
