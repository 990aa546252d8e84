"""Measures: what eviction does to the model's predictions, step by step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_BLOCK = 32  # steps: the double-precision copy of their logits is what takes memory


@dataclass(frozen=True, eq=False)
class Predictions:
    """The full and the evicted model side by side over n consecutive steps.

    Attributes:
        kl: [n] float64, KL(full || evicted) of the next-token distributions, nats; NaN where a logit of either run
            is not a finite number (or -inf, a token that cannot come).
        agree: [n] bool, both find the same token likeliest.
        nll_full, nll_evicted: [m] float64, -log p of the token that the text goes on with, nats; m the
            steps whose next token is known. NaN where `kl` is.
    """

    kl: Tensor
    agree: Tensor
    nll_full: Tensor
    nll_evicted: Tensor


def compare(full: Tensor, evicted: Tensor, following: Tensor) -> Predictions:
    """Hold two runs of the same tokens against each other, in float64.

    Args:
        full, evicted: [n, V] logits.
        following: [m] int64 tokens that the first m steps predict, m <= n.
    """
    kl: list[Tensor] = []
    agree: list[Tensor] = []
    nll_full: list[Tensor] = []
    nll_evicted: list[Tensor] = []
    for start in range(0, full.shape[0], _BLOCK):
        part = slice(start, start + _BLOCK)
        p, q = (logits[part].to(torch.float64).log_softmax(-1) for logits in (full, evicted))
        # Where p is 0 its logarithm may be -inf, and such tokens add nothing.
        terms = torch.where(p > -torch.inf, p.exp() * (p - q), 0.0)
        total = terms.sum(-1).clamp_min(0.0)  # negative only by rounding
        # An infinite KL says that a token became impossible: no logit of a model does that but by overflow.
        sound = torch.isfinite(total)
        kl.append(total.masked_fill(~sound, torch.nan))
        agree.append(p.argmax(-1) == q.argmax(-1))
        index = following[part][:, None]  # [at most b, 1]
        known = index.shape[0]
        for found, logs in ((nll_full, p), (nll_evicted, q)):
            found.append((-logs[:known].gather(1, index)[:, 0]).masked_fill(~sound[:known], torch.nan))
    return Predictions(*(torch.cat(parts) for parts in (kl, agree, nll_full, nll_evicted)))
