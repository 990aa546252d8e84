"""Rows whose set lies so far below the largest logit that its exponentials underflow: once more, by its own maximum."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .softmax import over_set


@dataclass(frozen=True, eq=False)
class Rows:
    """Both sides of a cut for some query rows of one KV head.

    Attributes:
        retained: [r, Dv] f_R, zero where nothing is retained.
        difference: [r, Dv] fE - f_R.
        mass: [r] float64, share of attention that the evicted tokens had.
    """

    retained: Tensor
    difference: Tensor
    mass: Tensor


def by_own_maximum(logits: Tensor, gone: Tensor, values: Tensor, sinks: Tensor | None) -> Rows:
    """Attention over the retained and over the evicted tokens, each with its own maximum subtracted.

    Args:
        logits: [n, r], -inf where a row does not see a token.
        gone: [n, r] bool, evicted before the row's step.
        values: [n, Dv], finite.
        sinks: [r] or None.
    """
    rest = over_set(logits.masked_fill(gone, float("-inf")), values, sinks, True)
    lost = over_set(logits.masked_fill(~gone, float("-inf")), values, None, True)
    odds = (lost.shift.double() - rest.shift) + (lost.log_mass.double() - rest.log_mass)  # e^-104 is 0 in float32
    return Rows(rest.mean, lost.mean - rest.mean, torch.where(lost.empty, 0.0, odds.sigmoid()))
