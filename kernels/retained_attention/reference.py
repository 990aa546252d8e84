"""Attention over visible and over retained tokens, and what eviction did to it: the definition, in plain torch.

Row i is visible to step t iff first_visible[t] <= rows[i] <= t, and retained iff t < evict_step[i].
Logits are kept transposed, [keys, queries], so that picking the columns of a retained set copies
contiguous memory; one block of them serves every retained set.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .inputs import Inputs, Seen, expect_evict_steps
from .softmax import SetOutput, over_set


@dataclass(frozen=True, eq=False)
class CellBlock:
    """One retained set (cell) over one block of b steps.

    Attributes:
        cell: index into `evict_steps`.
        rows: which of the steps.
        full: [H, b, Dv] f_V, output over all visible tokens (shared by the cells of a block).
        retained: [H, b, Dv] f_R, output over the retained ones; zero where there are none.
        error: [H, b, Dv] e = f_V - f_R, computed as mass · (fE - f_R); exactly 0 where nothing
            visible is evicted, and f_R is then f_V bit for bit.
        mass: [H, b] m, share of attention that the evicted tokens had.
        gap: [H, b] |fE - f_R|, fE the weighted mean of the evicted values; NaN where nothing
            visible is evicted.
    """

    cell: int
    rows: slice
    full: Tensor
    retained: Tensor
    error: Tensor
    mass: Tensor
    gap: Tensor


def attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    steps: Tensor,
    rows: Tensor,
    first_visible: Tensor,
    scale: float,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    block: int | None = None,
) -> Tensor:
    """Attention output over all visible tokens, without the output projection.

    Args:
        queries: [H, R, D] float32 or float64, as all floating arguments and the result.
        keys: [Hk, N, D]; query head h reads KV head h // (H / Hk).
        values: [Hk, N, Dv].
        steps: [R] row index of each query.
        rows: [N] row index of each key.
        first_visible: [R] oldest row that each query sees.
        scale: factor on q·k.
        softcap: c of c·tanh(z/c), or None.
        sink_logits: [H] logits without a value in the denominator, or None.
        block: steps in a block; None chooses.

    Returns:
        [H, R, Dv], zero where a query sees nothing.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    inputs = Inputs.checked(queries, keys, values, steps, rows, first_visible, scale, softcap, sink_logits, block)
    output = queries.new_empty(inputs.heads, queries.shape[1], values.shape[2])
    for part in inputs.parts():
        seen = Seen.of(inputs, part)
        for kv_head in range(inputs.kv_heads):
            group = inputs.query_heads_of(kv_head)
            logits = inputs.logits(kv_head, part, seen)
            whole = over_set(logits, seen.pick(values[kv_head]), inputs.sinks(group, part), inputs.finite[kv_head])
            output[group, part] = whole.mean.view(inputs.group, -1, values.shape[2])
    return output


def retained_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    evict_steps: Tensor,
    *,
    steps: Tensor,
    rows: Tensor,
    first_visible: Tensor,
    scale: float,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    block: int | None = None,
) -> Iterator[CellBlock]:
    """What many retained sets (cells) do to attention, in one pass over queries, keys and values.

    Args:
        evict_steps: [C, Hk, N] integers; N as in `keys`.
        block: steps in a block; None chooses.
        The others as in `attention`.

    Yields:
        Blocks of steps in order, and in each block every cell in order.

    Raises:
        ValueError: shapes or dtypes that do not fit, at the call and not at the first block.
    """
    inputs = Inputs.checked(queries, keys, values, steps, rows, first_visible, scale, softcap, sink_logits, block)
    expect_evict_steps(evict_steps, keys)
    return _blocks(inputs, evict_steps)


def _blocks(inputs: Inputs, evict_steps: Tensor) -> Iterator[CellBlock]:
    cells, value_dim = evict_steps.shape[0], inputs.values.shape[2]
    for part in inputs.parts(cells):
        seen, steps = Seen.of(inputs, part), inputs.steps[part]
        shape = (inputs.heads, int(steps.numel()))
        full = inputs.queries.new_empty(*shape, value_dim)
        retained = inputs.queries.new_empty(cells, *shape, value_dim)
        error, mass = torch.zeros_like(retained), retained.new_zeros(cells, *shape)
        gap = torch.full_like(mass, float("nan"))
        leaving = evict_steps[:, :, seen.columns]  # [C, Hk, n]
        oldest, newest = steps.min(), steps.max()
        for kv_head in range(inputs.kv_heads):
            group = inputs.query_heads_of(kv_head)
            logits, values = inputs.logits(kv_head, part, seen), seen.pick(inputs.values[kv_head])
            sinks, finite = inputs.sinks(group, part), inputs.finite[kv_head]
            whole = over_set(logits.clone(), values, sinks, finite).mean  # [G b, Dv]
            full[group] = whole.view(inputs.group, -1, value_dim)
            for cell in range(cells):
                leaves = leaving[cell, kv_head]
                kept, evicted = leaves > oldest, leaves <= newest  # at some step of the block; both: changes inside
                if not bool(evicted.any()):
                    retained[cell, group] = full[group]
                    continue
                rest = _side(logits, values, kept, evicted, leaves, steps, sinks, finite, gone=True)
                lost = _side(logits, values, evicted, kept, leaves, steps, None, finite, gone=False)
                found = _compare(whole, rest, lost)
                for array, one in zip((retained, error, mass, gap), found, strict=True):
                    array[cell, group] = one.view(array[cell, group].shape)
        for cell in range(cells):
            yield CellBlock(cell, part, full, retained[cell], error[cell], mass[cell], gap[cell])


def _side(
    logits: Tensor,
    values: Tensor,
    columns: Tensor,
    others: Tensor,
    leaves: Tensor,
    steps: Tensor,
    sinks: Tensor | None,
    finite: bool,
    *,
    gone: bool,
) -> SetOutput:
    """Attention over `columns` [n] bool, hidden where a token is `gone` (retained side) or not yet (evicted side).

    Columns are picked rather than given a weight of zero, so what lies in the others cannot matter.
    """
    index = columns.nonzero()[:, 0]
    side = logits.index_select(0, index)
    changing = (columns & others)[index].nonzero()[:, 0]
    if changing.numel():  # leave inside the block
        hidden = (steps[None, :] >= leaves[index][changing][:, None]) == gone  # [changing, b]
        hidden = hidden.repeat(1, logits.shape[1] // steps.numel())
        side[changing] = side[changing].masked_fill(hidden, float("-inf"))
    return over_set(side, values.index_select(0, index), sinks, finite)


def _compare(whole: Tensor, rest: SetOutput, lost: SetOutput) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Retained output and error [r, Dv], mass and gap [r], from f_V [r, Dv] and both sides of the cut."""
    touched = ~lost.empty  # queries that lost a token they would have seen
    # From log-sum-exps, the maxima subtracted first: exact where both logits are large.
    odds = (lost.shift - rest.shift) + (lost.log_mass - rest.log_mass)
    mass = torch.where(touched, odds.sigmoid(), 0.0)
    difference = lost.mean - rest.mean
    error = torch.where(touched[:, None], mass[:, None] * difference, 0.0)
    error = torch.where((touched & rest.empty)[:, None], whole, error)
    retained = torch.where(touched[:, None], rest.mean, whole)
    gap = torch.where(touched, difference.norm(dim=-1), float("nan"))
    return retained, error, mass, gap
