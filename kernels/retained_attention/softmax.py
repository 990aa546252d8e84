"""Softmax over one set of tokens, with the maximum of that very set subtracted."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class SetOutput:
    """Attention of r queries over one set.

    Attributes:
        mean: [r, Dv] sum of weight · value; zero over an empty set.
        shift: [r] what was subtracted from every logit.
        log_mass: [r] log of the denominator after the shift (the sink's share included);
            `shift + log_mass` is the log-sum-exp. -inf over an empty set without a sink.
        empty: [r] bool, no token of the set is visible.
    """

    mean: Tensor
    shift: Tensor
    log_mass: Tensor
    empty: Tensor


def over_set(logits: Tensor, values: Tensor, sink: Tensor | None, finite: bool) -> SetOutput:
    """Attention over the tokens whose logit is not -inf.

    The maximum is the set's own (and the sink's): a set far below the maximum of the whole cache
    would underflow under that one, wrongly but without a NaN to betray it.

    Args:
        logits: [n, r], overwritten.
        values: [n, Dv].
        sink: [r] logit of the sink, or None.
        finite: `values` are known to be finite. Otherwise a NaN or an infinity reaches only the
            queries that see its token (0 · NaN is NaN in a plain product).
    """
    if logits.shape[0]:
        top = logits.amax(0)  # a NaN spreads, to the queries that see it
    else:
        top = logits.new_full((logits.shape[1],), float("-inf"))
    empty = top == float("-inf")
    shift = top if sink is None else torch.maximum(top, sink)
    shift = torch.where(shift == float("-inf"), 0.0, shift)
    bad = logits.new_zeros(0, dtype=torch.int64) if finite else (~torch.isfinite(values)).any(1).nonzero()[:, 0]
    seen = logits[bad] != float("-inf")
    weights = logits.sub_(shift).exp_()
    denominator = weights.sum(0)
    if sink is not None:
        denominator = denominator + (sink - shift).exp()
    if bad.numel():
        clean = values.clone()
        clean[bad] = 0.0
        total = weights.T @ clean
        for token, sees in zip(bad.tolist(), seen, strict=True):
            total += torch.where(sees[:, None], weights[token][:, None] * values[token], 0.0)
    else:
        total = weights.T @ values
    mean = torch.where(empty[:, None], 0.0, total / denominator[:, None])
    return SetOutput(mean, shift, denominator.log(), empty)
