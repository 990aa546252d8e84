"""Cells: the way of kvtool's own error norms, on the bench's cases."""

from __future__ import annotations

import torch
from torch import Tensor

from kvtool.bench.synthetic import Case
from kvtool.kernels.retained_attention.reference import retained_attention
from kvtool.metrics.step_errors import measure


def squared_errors(
    case: Case,
    evict_steps: Tensor,
    full: Tensor,
    *,
    steps: Tensor | None = None,
    first_visible: Tensor | None = None,
    projection: Tensor | None = None,
    gradients: Tensor | None = None,
) -> Tensor:
    """[C, H, R] float64 |f_V - f_R|^2."""
    at = case.steps if steps is None else steps
    found = measure(
        retained_attention(
            case.queries,
            case.keys,
            case.values,
            evict_steps,
            steps=at,
            rows=torch.arange(case.tokens),
            first_visible=torch.zeros_like(at) if first_visible is None else first_visible,
            scale=case.scale,
            softcap=case.softcap,
            sink_logits=case.sink_logits,
        ),
        at,
        len(evict_steps),
        projection=projection,
        output_gradients=gradients,
        gradient_rows=None if gradients is None else torch.arange(at.numel()),
    )
    return torch.stack([one.squared_error for one in found])
