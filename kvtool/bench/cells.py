"""Cells: the way of kvtool's own error norms, on the bench's cases."""

from __future__ import annotations

import torch
from torch import Tensor

from kvtool.bench.synthetic import Case
from kvtool.kernels.retained_attention.errors import CellErrors, cell_errors


def errors_of(
    case: Case,
    evict_steps: Tensor,
    full: Tensor,
    log_sum_exp: Tensor,
    *,
    steps: Tensor | None = None,
    projection: Tensor | None = None,
    gradients: Tensor | None = None,
) -> CellErrors:
    """What `kvtool ablate` asks for, which measures errors alone; f_V [H, R, Dv] is given, and the log-sum-exp [H, R]
    that every fused pass has at hand when it ends.

    Args:
        steps: [R] rows of the queries; None is behind all tokens.
    """
    at = case.steps if steps is None else steps
    return cell_errors(
        case.queries,
        case.keys,
        case.values,
        evict_steps,
        steps=at,
        rows=torch.arange(case.tokens),
        first_visible=torch.zeros_like(at),
        scale=case.scale,
        softcap=case.softcap,
        sink_logits=case.sink_logits,
        projection=projection,
        gradients=gradients,
        gradient_rows=None if gradients is None else torch.arange(at.numel()),
        which="errors",
        full=full,
        log_sum_exp=log_sum_exp,
    )


def squared_errors(
    case: Case, evict_steps: Tensor, full: Tensor, log_sum_exp: Tensor, *, steps: Tensor | None = None
) -> Tensor:
    """[C, H, R] float64 |f_V - f_R|^2."""
    found: Tensor = errors_of(case, evict_steps, full, log_sum_exp, steps=steps).squared_error
    return found
