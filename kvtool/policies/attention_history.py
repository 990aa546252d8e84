"""The running sum of attention that every token has received: the state of H2O and its relatives."""

from __future__ import annotations

import torch
from torch import Tensor

from kvtool.kernels.attention_mass import attention_mass
from kvtool.layer import Geometry
from kvtool.view import View


def no_history(geometry: Geometry) -> Tensor:
    """[H, 0] float64."""
    return torch.zeros(geometry.query_heads, 0, dtype=torch.float64)


def extend_history(history: Tensor, view: View) -> Tensor:
    """Add the attention of the steps view.start..view.step-1.

    The softmax of each step runs over what was live at that step: retained and inside the
    layer's window. Blockwise, so that no T x T matrix exists; in float64, because sums in 16
    bits stop growing.

    Args:
        history: [H, rows so far] float64, one accumulator per query head and row.

    Returns:
        [H, view.step] float64; the argument is left as it was. Policies that begin with an untouched cache share
        one, which none of them may change.
    """
    untouched = history.shape[1] == 0 and bool((view.evict_step >= view.step).all())
    key = ("attention history", view.start, view.step)
    if untouched and key in view.shared:
        known: Tensor = view.shared[key]
        return known
    extended = _extended(history, view)
    if untouched:
        view.shared[key] = extended
    return extended


def _extended(history: Tensor, view: View) -> Tensor:
    geometry = view.geometry
    steps = torch.arange(view.start, view.step)
    added = attention_mass(
        view.queries(view.start, view.step),
        view.keys,
        steps=steps,
        rows=view.tokens,
        first_visible=geometry.first_visible(steps),
        evict_step=view.evict_step,
        scale=geometry.scale,
        softcap=geometry.softcap,
        sink_logits=geometry.sink_logits,
    )
    longer = torch.zeros(geometry.query_heads, view.step, dtype=torch.float64)
    longer[:, : history.shape[1]] = history
    return longer.scatter_add_(1, view.tokens.repeat_interleave(geometry.group, dim=0), added)


def history_of_candidates(history: Tensor, view: View) -> Tensor:
    """[H, N] float64, the accumulators of `view.tokens`."""
    return history.gather(1, view.tokens.repeat_interleave(view.geometry.group, dim=0))
