"""Weights of the capacity policies: how much a token's response to the query moves the output."""

from __future__ import annotations

from dataclasses import dataclass
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


def attention_at(z: Tensor, tau: float, sink_logit: float | None) -> tuple[Tensor, Tensor]:
    """Softmax of z / tau [n], and the sink's own share: 0 without one."""
    total = torch.logsumexp(z / tau, dim=0)
    if sink_logit is None:
        return torch.exp(z / tau - total), torch.zeros((), dtype=z.dtype)
    sink = torch.tensor(sink_logit / tau, dtype=z.dtype)
    total = torch.logaddexp(total, sink)
    return torch.exp(z / tau - total), torch.exp(sink - total)


def relevance(
    kind: Relevance, keys: Tensor, mean: Tensor, z: Tensor, *, tau: float, shift: Shift, sink_logit: float | None
) -> Tensor:
    """[n], how much the mean query concerns itself with each token.

    `softmax` is attention at temperature tau, a sink logit in its denominator; the others are
    exp(tau·z), exp(tau·cosine) and 1. Their maximum is subtracted with `shift="max"`, which
    changes ranks under a fixed ridge.
    """
    if kind == "softmax":
        return attention_at(z, tau, sink_logit)[0]
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


@dataclass(frozen=True, eq=False)
class CentredWeights:
    """What one query head's tokens contribute once their common response is taken out.

    Attributes:
        weights: [n], of the directions u_i - ubar.
        attention: [n], the weights of ubar = sum of a_i u_i.
        sink: the weight of ubar itself, which a sink logit leaves in; 0 without one.
    """

    weights: Tensor
    attention: Tensor
    sink: float


def centred_weights(
    keys: Tensor,
    mean: Tensor,
    covariance: Tensor,
    response: Response,
    *,
    scale: float,
    softcap: float | None,
    tau: float,
    sink_logit: float | None,
) -> CentredWeights:
    """The softmax Jacobian with its rank-one term: s^2 a_i^2 kappa(k~_i - kbar), kbar = sum of a_j k~_j.

    A sink is a token with neither key nor output: its own term has the key -kbar and the direction -ubar.

    Args:
        keys: [n, D] float64 of the pool.
        mean, covariance: [D], [D, D] of the expected query.
    """
    z, slope = logits_and_slope(keys, mean, scale, softcap)
    attention, sink = attention_at(z, tau, sink_logit)
    if response == "none":
        return CentredWeights(attention.square(), attention, float(sink.square()))
    soft = slope[:, None] * keys
    centre = attention @ soft  # [D]
    moved = torch.cat([soft - centre, centre[None]])
    kappa = response_variance(moved, torch.ones(len(moved), dtype=keys.dtype), covariance, response)
    weights = scale**2 * torch.cat([attention, sink[None]]).square() * kappa
    return CentredWeights(weights[:-1], attention, float(weights[-1]))
