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
        gram = u.T @ (w[:, None] * u)
        found.append(0.5 * torch.log1p(torch.linalg.eigvalsh(gram).clamp_min(0)).sum())
    return torch.stack(found)
