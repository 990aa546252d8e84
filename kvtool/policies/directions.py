"""Directions: in which way a token moves what the policy measures."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from kvtool.view import View

DirectionKind = Literal["values", "outputs", "fisher"]


def direction_map(
    view: View, kind: DirectionKind, head: int, fisher_steps: int, calibration: str | None
) -> Tensor | None:
    """[r, Dv] float64, what turns a value of query head `head` into its direction; None for the value itself.

    `outputs` is L^T with L L^T = W_O^T W_O of the head, so that |u| = |W_O v|: the triangle of a QR
    factorisation, where no M x M matrix appears and a deficient rank does no harm. `fisher` is the
    square root of Gamma, the mean of g g^T over draws and the newest `fisher_steps` steps with a
    gradient, or over all gradients of a calibration trace: |u|^2 is what a change by v costs the
    model's predictions.

    Raises:
        KvtoolError: code `trace-lacks`.
    """
    if kind == "values":
        return None
    if kind == "outputs":
        weight = view.output_projection[head].to(torch.float64)  # [Dv, M]
        triangle: Tensor = torch.linalg.qr(weight.T, mode="r").R
        return triangle
    if calibration is not None:
        return symmetric_root(view.information(calibration)[head])
    gradients = view.gradients(fisher_steps)[:, head].to(torch.float64).flatten(0, 1)  # [S·n, Dv]
    return symmetric_root(gradients.T @ gradients / len(gradients))


def symmetric_root(matrix: Tensor) -> Tensor:
    """The symmetric square root of a positive semi-definite `matrix` [n, n]."""
    values, vectors = torch.linalg.eigh(matrix)
    root: Tensor = (vectors * values.clamp_min(0).sqrt()) @ vectors.T
    return root


def directions(values: Tensor, mapping: Tensor | None) -> Tensor:
    """[N, r] of `values` [N, Dv]."""
    return values if mapping is None else values.to(torch.float64) @ mapping.T
