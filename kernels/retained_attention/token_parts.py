"""What each evicted token does to attention's output, in plain torch: an exact split of f_R - f_V.

f_R - f_V = sum over evicted i of a_i / (1 - m) · (f_V - v_i), a_i the weight of token i among all visible
ones and m the evicted tokens' share. a_i / (1 - m) is exp(z_i - log of the retained denominator): no
difference of nearly equal numbers, however large m is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .inputs import Inputs, Seen
from .softmax import over_set


def evicted_token_dots(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    evict_step: Tensor,
    directions: Tensor,
    *,
    steps: Tensor,
    rows: Tensor,
    first_visible: Tensor,
    scale: float,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    block: int | None = None,
) -> Tensor:
    """Per query head and token, the sum over steps of direction · its part of f_R - f_V.

    Where a step retains nothing, f_R is the zero vector and a token's part is -a_i v_i.

    Args:
        queries: [H, R, D], keys: [Hk, N, D], values: [Hk, N, Dv] and the others as in `reference.attention`.
        evict_step: [Hk, N] integers.
        directions: [H, R, Dv] in the dtype of `queries`.

    Returns:
        [H, N], 0 for tokens that no step both sees and lacks.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    inputs = Inputs.checked(queries, keys, values, steps, rows, first_visible, scale, softcap, sink_logits, block)
    heads, value_dim = inputs.heads, values.shape[2]
    if tuple(directions.shape) != (heads, queries.shape[1], value_dim) or directions.dtype != queries.dtype:
        raise ValueError(f"directions {list(directions.shape)} {directions.dtype} do not fit the queries")
    if tuple(evict_step.shape) != tuple(keys.shape[:2]) or evict_step.is_floating_point():
        raise ValueError(f"evict_step {list(evict_step.shape)} is not [Hk, N] integers of keys {list(keys.shape)}")
    dots = queries.new_zeros(heads, keys.shape[1])
    for part in inputs.parts():
        seen, count = Seen.of(inputs, part), part.stop - part.start
        columns = torch.arange(keys.shape[1])[seen.columns]  # [n]
        for kv_head in range(inputs.kv_heads):
            gone = steps[part][None, :] >= evict_step[kv_head, columns][:, None]  # [n, b]
            lost = gone.any(1).nonzero()[:, 0]
            if not lost.numel():
                continue
            group = inputs.query_heads_of(kv_head)
            logits, seen_values = inputs.logits(kv_head, part, seen), seen.pick(values[kv_head])
            sinks, finite = inputs.sinks(group, part), inputs.finite[kv_head]
            hidden = gone.repeat(1, inputs.group)  # [n, G b]
            whole = over_set(logits.clone(), seen_values, sinks, finite)
            rest = over_set(logits.masked_fill(hidden, float("-inf")), seen_values, sinks, finite)
            nothing = rest.empty & (rest.log_mass == float("-inf"))  # no sink either
            lse = torch.where(nothing, whole.shift + whole.log_mass, rest.shift + rest.log_mass)
            centre = torch.where(nothing[:, None], 0.0, whole.mean)  # [G b, Dv]
            toward = directions[group, part].reshape(-1, value_dim)  # [G b, Dv]
            weights = logits[lost].masked_fill_(~hidden[lost], float("-inf")).sub_(lse).exp_()  # [lost, G b]
            offsets = (toward * centre).sum(-1) - seen_values[lost] @ toward.T
            parts = torch.where(weights > 0, weights * offsets, 0.0)  # an unseen token's NaN stays unseen
            summed = parts.view(lost.numel(), inputs.group, count).sum(-1)  # [lost, G]
            dots[group] = dots[group].index_add(1, columns[lost], summed.T.contiguous())
    return dots
