"""Attention as kvtool understands it, in float64: what the probe holds a model's own output against."""

from __future__ import annotations

import torch
from torch import Tensor

from kvtool.capture.visibility import visible
from kvtool.layer import Geometry


def attend(geometry: Geometry, queries: Tensor, keys: Tensor, values: Tensor, start: int = 0) -> Tensor:
    """Attention output [H, n, Dv] in float64 of queries [H, n, D] at steps start.. over keys of the newest rows.

    Causal mask and window, scale, softcap and sink logits are applied; there is nothing else.

    Args:
        keys, values: [Hk, Tk, .], the last row being that of the last query.
    """
    n, columns = queries.shape[1], keys.shape[1]
    steps = torch.arange(start, start + n)
    rows = torch.arange(start + n - columns, start + n)
    k = keys.to(torch.float64).repeat_interleave(geometry.group, 0)  # [H, Tk, D]
    v = values.to(torch.float64).repeat_interleave(geometry.group, 0)
    logits = queries.to(torch.float64) @ k.transpose(1, 2) * geometry.scale  # [H, n, Tk]
    if geometry.softcap is not None:
        logits = geometry.softcap * torch.tanh(logits / geometry.softcap)
    logits = logits.masked_fill(~visible(geometry, steps, rows), float("-inf"))
    if geometry.sink_logits is not None:
        sinks = geometry.sink_logits.to(torch.float64)[:, None, None].expand(-1, n, 1)
        return torch.cat([logits, sinks], -1).softmax(-1)[..., :-1] @ v
    return logits.softmax(-1) @ v


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Frobenius norm of the difference over that of `expected`; NaN counts as infinite."""
    difference = (found.to(torch.float64) - expected.to(torch.float64)).norm()
    error = float(difference / expected.to(torch.float64).norm().clamp_min(1e-300))
    return error if error == error else float("inf")
