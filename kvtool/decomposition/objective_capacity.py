"""The capacity that a policy's own objective sees in a kept set."""

from __future__ import annotations

import torch
from torch import Tensor

from kvtool.policies.objective import Objective


def objective_capacity(objective: Objective | None, heads: slice, kept: Tensor) -> Tensor:
    """[G] nats: 1/2 logdet(I + sum over kept i of w_i u_i u_i^T / ridge); NaN without an objective.

    Args:
        heads: query heads of one KV head.
        kept: [N] bool over its candidates.
    """
    count = heads.stop - heads.start
    if objective is None:
        return torch.full((count,), torch.nan, dtype=torch.float64)
    found = []
    for head in range(heads.start, heads.stop):
        u = objective.directions[head, kept].to(torch.float64)
        w = objective.weights[head, kept].to(torch.float64) / objective.ridge[head].to(torch.float64)
        # Of the rows, not of their Gram matrix: rounding of its large eigenvalues would pass for small ones.
        strengths = torch.linalg.svdvals(w.sqrt()[:, None] * u).square()
        found.append(0.5 * torch.log1p(strengths).sum())
    return torch.stack(found)
