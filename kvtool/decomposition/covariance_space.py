"""Covariance space: what capacity makes of the same approximations.

If queries scatter about the centre with covariance Lambda, the linearised output scatters with J Lambda J^T.
Capacity policies work with cheaper stand-ins for it. None is above another in quality: each is measured.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvtool.kernels.tangent import Tangent

KINDS = ("full", "competition", "response", "centred")


def covariances(tangent: Tangent, full: Tensor, diagonal: Tensor, covariance: Tensor) -> dict[str, Tensor]:
    """The four covariances of the linearised output, each [G, Dv, Dv].

    * full: J Lambda J^T
    * competition: JD Lambda JD^T, each token by itself
    * response: sum_i w_i u_i u_i^T, w_i = s^2 [a_i (1 - a_i)]^2 k~_i^T Lambda k~_i: tokens also respond by themselves
    * centred: the same sum with u_i - ubar, k~_i - kbar and a_i for a_i (1 - a_i), the sink being a token with
      u = k~ = 0: competition is kept whole, only responses across tokens are dropped

    Args:
        full, diagonal: J and JD, [G, Dv, D].
        covariance: [G, D, D], Lambda.
    """
    found = {
        "full": full @ covariance @ full.transpose(1, 2),
        "competition": diagonal @ covariance @ diagonal.transpose(1, 2),
        "response": torch.empty_like(full @ full.transpose(1, 2)),
    }
    found["centred"] = torch.empty_like(found["response"])
    square = tangent.scale**2
    for head, (a, lam) in enumerate(zip(tangent.weights, covariance, strict=True)):
        keys, middle = tangent.slopes[head][:, None] * tangent.keys, tangent.output[head]
        found["response"][head] = square * _gram(tangent.directions, (a * (1 - a)).square() * _spread(keys, lam))
        mean = a @ keys
        centred = _gram(tangent.directions - middle, a.square() * _spread(keys - mean, lam))
        sink = tangent.sink_weight[head].square() * _spread(mean[None], lam)
        found["centred"][head] = square * (centred + sink * torch.outer(middle, middle))
    return found


def _spread(keys: Tensor, covariance: Tensor) -> Tensor:
    """[n], k^T Lambda k, never below 0 by rounding."""
    return ((keys @ covariance) * keys).sum(1).clamp_min(0)


def _gram(directions: Tensor, weights: Tensor) -> Tensor:
    """[Dv, Dv], sum_i w_i u_i u_i^T."""
    return directions.T @ (weights[:, None] * directions)


def relative_errors(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Per stand-in [G]: |Cov_full - Cov_x|_F / |Cov_full|_F; NaN where Cov_full is zero."""
    full = found["full"]
    return {
        f"diagonal_cov_error_{kind}": torch.linalg.matrix_norm(full - found[kind]) / torch.linalg.matrix_norm(full)
        for kind in KINDS[1:]
    }


def output_covariance(outputs: Tensor) -> Tensor:
    """[G, Dv, Dv], covariance of the outputs [G, F, Dv] about their mean, divided by F."""
    centred = outputs - outputs.mean(1, keepdim=True)
    return centred.transpose(1, 2) @ centred / outputs.shape[1]


def capacities(covariance: Tensor, noises: Tensor) -> Tensor:
    """[G, m] nats: 1/2 logdet(I + Cov / sigma^2) at m noises; NaN where sigma^2 is 0.

    Args:
        covariance: [G, Dv, Dv].
        noises: [G, m], sigma^2.
    """
    strengths = torch.linalg.eigvalsh((covariance + covariance.transpose(1, 2)) / 2).clamp_min(0)  # [G, Dv]
    found = 0.5 * torch.log1p(strengths[:, None, :] / noises[:, :, None]).sum(-1)
    return torch.where(noises > 0, found, torch.nan)
