"""From what the Triton kernel sums up to `CellErrors`: the last steps, in float64 on the same device."""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import CellErrors

STATISTICS = 5  # |f_V|^2, |d|^2, |d across f_V|^2, f_V·f_R, |f_R|^2 with d = fE - f_R


def sound_values(values: Tensor) -> tuple[Tensor, Tensor | None]:
    """`values` [Hk, N, Dv] with zeros for tokens that hold a NaN or an infinity, and which those are [Hk, N].

    A product would carry 0 · NaN to queries that do not see the token.
    """
    sound = torch.isfinite(values).all(-1)
    if bool(sound.all()):
        return values, None
    return torch.where(sound[..., None], values, 0), ~sound


def fill_norms(found: CellErrors, part: slice, cells: slice, odds: Tensor, sums: Tensor, only_errors: bool) -> None:
    """Fill in the steps `part` of some cells.

    Args:
        odds: [c, H, b] log of evicted over retained mass, -inf where nothing visible is evicted.
        sums: [STATISTICS, c, H, b] float32.
    """
    whole, difference, across, product, retained = sums.double().unbind(0)
    odds = odds.double()
    touched = odds != float("-inf")
    mass = torch.where(touched, odds.sigmoid(), 0.0)
    found.squared_output[:, part] = whole[0]
    found.squared_error[cells, :, part] = torch.where(touched, mass.square() * difference, 0.0)
    if only_errors:
        return
    found.mass[cells, :, part] = mass
    found.gap[cells, :, part] = torch.where(touched, difference.sqrt(), float("nan"))
    # f_R = f_V - m d, so what of it lies across f_V is m times that of d: exact however small the angle is.
    cosine = product / (whole * retained).sqrt()
    sine_squared = torch.where(touched, mass.square() * across / retained, 0.0)
    distance = torch.where(cosine > 0, sine_squared / (1.0 + cosine), 1.0 - cosine)
    found.cosine[cells, :, part] = distance  # 0 / 0, a NaN, where either vector is zero


def fill_products(
    found: CellErrors,
    part: slice,
    cells: slice,
    errors: Tensor,
    outputs: Tensor,
    projection: Tensor | None,
    gradients: Tensor | None,
    gradient_rows: Tensor | None,
) -> None:
    """What needs whole vectors: errors [c, H, b, Dv] of some cells and outputs [H, b, Dv], float32."""
    if projection is not None and found.layer_squared_error is not None and found.layer_squared_output is not None:
        flat = projection.reshape(-1, projection.shape[2]).to(errors.dtype)  # [H Dv, M]
        for into, vectors in (
            (found.layer_squared_error[cells, part], errors),
            (found.layer_squared_output[None, part], outputs[None]),
        ):
            rows = vectors.transpose(1, 2).flatten(2)  # [c, b, H Dv]: heads are summed before the norm
            into.copy_((rows @ flat).double().square().sum(-1))
    if gradients is not None and gradient_rows is not None and found.gradient_dot is not None:
        at = gradient_rows[part]
        slopes = gradients[:, :, at.clamp_min(0)].double()  # [S, H, b, Dv]
        for cell, error in zip(range(cells.start, cells.stop), errors, strict=True):
            dots = -(slopes * error.double()).sum(-1)  # [S, H, b]
            found.gradient_dot[cell, :, :, part] = torch.where(at >= 0, dots, float("nan"))


def hide_unsound(
    found: CellErrors, touched: Tensor, unsound: Tensor, steps: Tensor, rows: Tensor, first_visible: Tensor
) -> None:
    """NaN at the queries that see a token with a NaN or an infinity among its values.

    Args:
        touched: [C, H, R] bool, where something visible is evicted; elsewhere the error stays exactly 0.
        unsound: [Hk, N] bool; the kernel took zeros for their values.
    """
    bad = unsound.any(0).nonzero()[:, 0]
    seen = (rows[bad, None] <= steps) & (rows[bad, None] >= first_visible)  # [bad, R]
    blind = unsound[:, bad].double() @ seen.double() > 0  # [Hk, R]
    blind = blind.repeat_interleave(touched.shape[1] // len(blind), 0)  # [H, R]
    nan = float("nan")
    found.squared_output.masked_fill_(blind, nan)
    touched = touched & blind
    found.squared_error.masked_fill_(touched, nan)
    found.gap.masked_fill_(touched, nan)
    found.cosine.masked_fill_(blind, nan)
    if found.layer_squared_output is not None and found.layer_squared_error is not None:
        found.layer_squared_output.masked_fill_(blind.any(0), nan)
        found.layer_squared_error.masked_fill_(touched.any(1), nan)
    if found.gradient_dot is not None:
        found.gradient_dot.masked_fill_(touched[:, None], nan)
