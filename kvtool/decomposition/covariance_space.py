"""Covariance space: what capacity makes of the same approximations.

If queries scatter about the centre with covariance Lambda, the linearised output scatters with J Lambda J^T.
Capacity policies work with cheaper stand-ins for it. None is above another in quality: each is measured.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvtool.kernels.tangent import Tangent

# Relative to what a number was made of; below it a number that should be zero is rounding.
ROUNDING = 1e-13
KINDS = ("full", "competition", "response", "centred")


def roots(tangent: Tangent, full: Tensor, diagonal: Tensor, covariance: Tensor) -> dict[str, list[Tensor]]:
    """Per query head a root R [r, Dv] of each of the four covariances R^T R of the linearised output.

    * full: J Lambda J^T
    * competition: JD Lambda JD^T, each token by itself
    * response: sum_i w_i u_i u_i^T, w_i = s^2 [a_i (1 - a_i)]^2 k~_i^T Lambda k~_i: tokens also respond by themselves
    * centred: the same sum with u_i - ubar, k~_i - kbar and a_i for a_i (1 - a_i), the sink being a token with
      u = k~ = 0: competition is kept whole, only responses across tokens are dropped

    Args:
        full, diagonal: J and JD, [G, Dv, D].
        covariance: [G, D, D], Lambda.
    """
    values, vectors = torch.linalg.eigh((covariance + covariance.transpose(1, 2)) / 2)
    spread = vectors * values.clamp_min(0).sqrt()[:, None, :]  # [G, D, D], spread spread^T = Lambda
    found: dict[str, list[Tensor]] = {
        "full": list((full @ spread).transpose(1, 2)),
        "competition": list((diagonal @ spread).transpose(1, 2)),
        "response": [],
        "centred": [],
    }
    for head, (a, lam) in enumerate(zip(tangent.weights, covariance, strict=True)):
        keys, middle = tangent.slopes[head][:, None] * tangent.keys, tangent.output[head]
        response = tangent.scale * a * (1 - a) * _spread(keys, lam).sqrt()
        found["response"].append(response[:, None] * tangent.directions)
        mean = a @ keys
        centred = tangent.scale * a * _spread(keys - mean, lam).sqrt()
        sink = tangent.scale * tangent.sink_weight[head] * _spread(mean[None], lam).sqrt()
        found["centred"].append(torch.cat([centred[:, None] * (tangent.directions - middle), sink * middle[None]]))
    return found


def covariances(found: dict[str, list[Tensor]]) -> dict[str, Tensor]:
    """[G, Dv, Dv] of each root."""
    return {kind: torch.stack([root.T @ root for root in heads]) for kind, heads in found.items()}


def _spread(keys: Tensor, covariance: Tensor) -> Tensor:
    """[n], k^T Lambda k, never below 0 by rounding."""
    return ((keys @ covariance) * keys).sum(1).clamp_min(0)


def relative_errors(found: dict[str, Tensor], floor: Tensor) -> dict[str, Tensor]:
    """Per stand-in [G]: |Cov_full - Cov_x|_F / |Cov_full|_F; NaN where Cov_full is zero.

    Args:
        floor: [G], what rounding alone can make of a Cov_full that is zero.
    """
    full = found["full"]
    size = torch.linalg.matrix_norm(full)
    size = torch.where(size > floor, size, torch.nan)
    return {f"diagonal_cov_error_{kind}": torch.linalg.matrix_norm(full - found[kind]) / size for kind in KINDS[1:]}


def rounding_floor(tangent: Tangent, covariance: Tensor) -> Tensor:
    """[G]: |Cov_full|_F that comes of rounding where keys, or values, are all equal."""
    if not tangent.keys.numel():
        return torch.zeros(len(covariance), dtype=torch.float64)
    longest = tangent.directions.norm(dim=1).amax() * tangent.keys.norm(dim=1).amax()
    size = torch.linalg.matrix_norm(covariance)
    found: Tensor = (ROUNDING * tangent.scale * longest).square() * size
    return found


def output_root(outputs: Tensor) -> list[Tensor]:
    """Per query head a root [F, Dv] of the covariance of the outputs [G, F, Dv] about their mean, divided by F."""
    return list((outputs - outputs.mean(1, keepdim=True)) / math.sqrt(outputs.shape[1]))


def capacities(found: list[Tensor], noises: Tensor) -> Tensor:
    """[G, m] nats: 1/2 logdet(I + Cov / sigma^2) at m noises; NaN where sigma^2 is 0.

    Singular values of roots, not eigenvalues of covariances: the rounding of a large eigenvalue would pass for
    small ones, and each would count.

    Args:
        found: per query head a root [r, Dv] of the covariance.
        noises: [G, m], sigma^2.
    """
    strengths = torch.stack([_strengths(root) for root in found])  # [G, Dv]
    nats = 0.5 * torch.log1p(strengths[:, None, :] / noises[:, :, None]).sum(-1)
    return torch.where(noises > 0, nats, torch.nan)


def _strengths(root: Tensor) -> Tensor:
    """[Dv] eigenvalues of root^T root, zeros included."""
    if root.shape[0] > 2 * root.shape[1]:
        root = torch.linalg.qr(root, mode="r").R
    values = torch.linalg.svdvals(root).square()
    return torch.nn.functional.pad(values, (0, root.shape[1] - values.numel()))
