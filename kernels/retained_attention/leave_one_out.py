"""What losing each token alone would do to attention's output, in plain torch, summed over the steps that lose it.

With f the output over all visible tokens and f_{-j} the output without token j,
f - f_{-j} = a_j / (1 - a_j) · (v_j - f) = a_j · (v_j - f_{-j}), a_j the weight of token j.
The first form needs no second softmax, and is used where a_j <= 1/2. Above that 1 - a_j is a small difference of
large numbers, and v_j - f another; at most one token of a query weighs so much, so f_{-j} is computed without it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .inputs import Inputs, Seen
from .softmax import SetOutput, over_set

HALF = 0.5


@dataclass(frozen=True, eq=False)
class LeftOut:
    """Sums over the steps at which each token is missing; float64.

    Attributes:
        squared_error: [H, N] sum of |f - f_{-j}|^2.
        mass: [H, N] sum of a_j.
        seen: [Hk, N] int64, steps that would see the token and miss it.
        squared_output: [H] sum of |f|^2 over all steps given.
    """

    squared_error: Tensor
    mass: Tensor
    seen: Tensor
    squared_output: Tensor


def leave_one_out(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    missing_from: Tensor,
    missing_until: Tensor,
    *,
    steps: Tensor,
    rows: Tensor,
    first_visible: Tensor,
    scale: float,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    block: int | None = None,
) -> LeftOut:
    """Every token alone, all others kept: at steps missing_from[j] <= t < missing_until[j].

    Args:
        queries: [H, R, D], keys: [Hk, N, D], values: [Hk, N, Dv] and the others as in `reference.attention`.
        missing_from, missing_until: [Hk, N] integers; equal where the token is never missing.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    inputs = Inputs.checked(queries, keys, values, steps, rows, first_visible, scale, softcap, sink_logits, block)
    for name, bound in (("missing_from", missing_from), ("missing_until", missing_until)):
        if tuple(bound.shape) != tuple(keys.shape[:2]) or bound.is_floating_point():
            raise ValueError(f"{name} {list(bound.shape)} is not [Hk, N] integers of keys {list(keys.shape)}")
    tokens = int(keys.shape[1])
    error = torch.zeros(inputs.heads, tokens, dtype=torch.float64)
    mass, output = torch.zeros_like(error), torch.zeros(inputs.heads, dtype=torch.float64)
    count = torch.zeros(inputs.kv_heads, tokens, dtype=torch.int64)
    for part in inputs.parts():
        seen, at = Seen.of(inputs, part), steps[part]
        columns = torch.arange(tokens)[seen.columns]  # [n]
        visible = torch.ones(columns.numel(), at.numel(), dtype=torch.bool)
        visible[seen.partial] = seen.visible
        for kv_head in range(inputs.kv_heads):
            group = inputs.query_heads_of(kv_head)
            logits, seen_values = inputs.logits(kv_head, part, seen), seen.pick(values[kv_head])
            sinks, finite = inputs.sinks(group, part), inputs.finite[kv_head]
            whole = over_set(logits.clone(), seen_values, sinks, finite)
            squares = whole.mean.to(torch.float64).square().sum(-1)  # [G b]
            output[group] += squares.view(inputs.group, -1).sum(1)
            since, until = (bound[kv_head, columns][:, None] for bound in (missing_from, missing_until))
            missing = (since <= at[None, :]) & (at[None, :] < until) & visible  # [n, b]
            lost = missing.any(1).nonzero()[:, 0]
            if not lost.numel():
                continue
            weights, errors = _alone(logits, seen_values, lost, whole, sinks, finite)  # [lost, G b] each
            hidden = ~missing[lost].repeat(1, inputs.group)
            for array, found in ((mass, weights), (error, errors)):
                kept = found.masked_fill(hidden, 0.0).to(torch.float64).view(lost.numel(), inputs.group, -1)
                array[group] = array[group].index_add(1, columns[lost], kept.sum(-1).T.contiguous())
            count[kv_head] = count[kv_head].index_add(0, columns[lost], missing[lost].sum(1))
    return LeftOut(error, mass, count, output)


def _alone(
    logits: Tensor, values: Tensor, lost: Tensor, whole: SetOutput, sinks: Tensor | None, finite: bool
) -> tuple[Tensor, Tensor]:
    """Weight and squared error [lost, r] of every lost token at every query of the block.

    Args:
        logits: [n, r], -inf where invisible; overwritten.
        lost: [lost] which of the n.
    """
    weights = (logits[lost] - (whole.shift + whole.log_mass)).exp()
    # Distances by differences: |v - f|^2 from squares and products loses a token whose value is nearly f.
    distance = torch.cdist(values[lost], whole.mean, compute_mode="donot_use_mm_for_euclid_dist")
    errors = (weights / (1.0 - weights) * distance).square()
    heavy = (weights > HALF).any(0).nonzero()[:, 0]  # [x] queries
    if heavy.numel():
        token = weights[:, heavy].argmax(0)  # [x] which of the lost
        others = logits[:, heavy]
        others[lost[token], torch.arange(heavy.numel())] = float("-inf")
        rest = over_set(others, values, None if sinks is None else sinks[heavy], finite)
        exact = (weights[token, heavy][:, None] * (values[lost[token]] - rest.mean)).square().sum(-1)
        errors[token, heavy] = exact
    return weights, errors
