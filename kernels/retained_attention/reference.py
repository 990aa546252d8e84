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

from kvtool.kernels.retained_attention.softmax import over_set

QUERY_ROWS = 256  # queries of one KV head in a block: enough for a fast product, small enough for the cache


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
    case = _Case.checked(queries, keys, values, steps, rows, first_visible, scale, softcap, sink_logits)
    output = queries.new_empty(case.heads, queries.shape[1], values.shape[2])
    for part in case.parts(block):
        seen = _Seen.of(case, part)
        for kv_head in range(case.kv_heads):
            group = case.query_heads_of(kv_head)
            logits = case.logits(kv_head, part, seen)
            whole = over_set(logits, seen.pick(values[kv_head]), case.sinks(group, part), case.finite[kv_head])
            output[group, part] = whole.mean.view(case.group, -1, values.shape[2])
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
    case = _Case.checked(queries, keys, values, steps, rows, first_visible, scale, softcap, sink_logits)
    if evict_steps.ndim != 3 or tuple(evict_steps.shape[1:]) != tuple(keys.shape[:2]):
        raise ValueError(f"evict_steps {list(evict_steps.shape)} is not [C, Hk, N] of keys {list(keys.shape)}")
    if evict_steps.is_floating_point():
        raise ValueError("evict_steps must be integers")
    return _blocks(case, evict_steps, block)


def _blocks(case: _Case, evict_steps: Tensor, block: int | None) -> Iterator[CellBlock]:
    cells, value_dim = evict_steps.shape[0], case.values.shape[2]
    for part in case.parts(block):
        seen, steps = _Seen.of(case, part), case.steps[part]
        shape = (case.heads, int(steps.numel()))
        full = case.queries.new_empty(*shape, value_dim)
        retained = case.queries.new_empty(cells, *shape, value_dim)
        error, mass = torch.zeros_like(retained), retained.new_zeros(cells, *shape)
        gap = torch.full_like(mass, float("nan"))
        leaving = seen.pick(evict_steps.transpose(0, 2)).transpose(0, 2)  # [C, Hk, n]
        for kv_head in range(case.kv_heads):
            group = case.query_heads_of(kv_head)
            logits, values = case.logits(kv_head, part, seen), seen.pick(case.values[kv_head])
            sinks, finite = case.sinks(group, part), case.finite[kv_head]
            full[group] = over_set(logits.clone(), values, sinks, finite).mean.view(case.group, -1, value_dim)
            for cell in range(cells):
                retained[cell, group] = full[group]
                leaves = leaving[cell, kv_head]
                # Columns kept (evicted) at some step of the block; those in both change inside it.
                kept, evicted = leaves > steps.min(), leaves <= steps.max()
                if not bool(evicted.any()):
                    continue
                sides = []
                for columns, sink, gone in ((kept, sinks, True), (evicted, None, False)):
                    index = columns.nonzero()[:, 0]
                    side = logits.index_select(0, index)
                    _hide(side, (kept & evicted)[index], leaves[index], steps, gone)
                    sides.append(over_set(side, values.index_select(0, index), sink, finite))
                rest, lost = sides
                # From log-sum-exps, maxima subtracted first: exact where both logits are large.
                odds = (lost.shift - rest.shift) + (lost.log_mass - rest.log_mass)
                difference = lost.mean - rest.mean  # [G b, Dv]
                touched = ~lost.empty  # steps that lost a token they would have seen
                share = torch.where(touched, odds.sigmoid(), 0.0)
                wrong = torch.where(touched[:, None], share[:, None] * difference, 0.0).view(case.group, -1, value_dim)
                nothing_left = (touched & rest.empty).view(case.group, -1, 1)
                error[cell, group] = torch.where(nothing_left, full[group], wrong)
                left = rest.mean.view(case.group, -1, value_dim)
                retained[cell, group] = torch.where(touched.view(case.group, -1, 1), left, full[group])
                mass[cell, group] = share.view(case.group, -1)
                length = torch.where(touched, difference.norm(dim=-1), float("nan"))
                gap[cell, group] = length.view(case.group, -1)
        for cell in range(cells):
            yield CellBlock(cell, part, full, retained[cell], error[cell], mass[cell], gap[cell])


def _hide(logits: Tensor, changing: Tensor, leaves: Tensor, steps: Tensor, gone: bool) -> None:
    """Set logits [n, G b] to -inf, in place, at the steps that find a `changing` [n] column gone (or still there)."""
    index = changing.nonzero()[:, 0]
    if index.numel():
        hidden = (steps[None, :] >= leaves[index][:, None]) == gone  # [changing, b]
        hidden = hidden.repeat(1, logits.shape[1] // steps.numel())
        logits[index] = logits[index].masked_fill(hidden, float("-inf"))


@dataclass(frozen=True, eq=False)
class _Seen:
    """Which keys a block of steps sees: columns invisible to all of them are left out."""

    columns: slice | Tensor  # n of the N keys
    partial: Tensor  # [n'] positions among the n that only some of the steps see
    visible: Tensor  # [n', b] which of the steps

    @classmethod
    def of(cls, case: _Case, part: slice) -> _Seen:
        steps, first = case.steps[part], case.first_visible[part]
        visible = (first[None, :] <= case.rows[:, None]) & (case.rows[:, None] <= steps[None, :])  # [N, b]
        index = visible.any(1).nonzero()[:, 0]
        columns: slice | Tensor = index
        if index.numel() == 0:
            columns = slice(0, 0)
        elif int(index[-1]) - int(index[0]) + 1 == index.numel():
            columns = slice(int(index[0]), int(index[-1]) + 1)  # one run, the usual case: no copy
        visible = visible[columns]
        partial = (~visible.all(1)).nonzero()[:, 0]
        return cls(columns, partial, visible[partial])

    def pick(self, array: Tensor) -> Tensor:
        """The seen rows [n, ...] of `array` [N, ...]."""
        return array[self.columns]


@dataclass(frozen=True, eq=False)
class _Case:
    """Checked arguments."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    steps: Tensor
    rows: Tensor
    first_visible: Tensor
    scale: float
    softcap: float | None
    sink_logits: Tensor | None
    finite: list[bool]  # per KV head: no NaN and no infinity among the values

    @classmethod
    def checked(
        cls,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        steps: Tensor,
        rows: Tensor,
        first_visible: Tensor,
        scale: float,
        softcap: float | None,
        sink_logits: Tensor | None,
    ) -> _Case:
        for name, array in (("queries", queries), ("keys", keys), ("values", values)):
            if array.ndim != 3:
                raise ValueError(f"{name} has shape {list(array.shape)}, expected three dimensions")
            if array.dtype not in (torch.float32, torch.float64) or array.dtype != queries.dtype:
                raise ValueError(f"{name} is {array.dtype}; all must be float32, or all float64")
        (heads, count, dim), (kv_heads, tokens, _) = queries.shape, keys.shape
        if keys.shape[2] != dim or values.shape[:2] != keys.shape[:2]:
            raise ValueError(
                f"queries {list(queries.shape)}, keys {list(keys.shape)} and values {list(values.shape)} do not fit"
            )
        if kv_heads == 0 or heads % kv_heads:
            raise ValueError(f"{heads} query heads cannot share {kv_heads} KV heads evenly")
        for name, array, size in (
            ("steps", steps, count),
            ("rows", rows, tokens),
            ("first_visible", first_visible, count),
        ):
            if tuple(array.shape) != (size,) or array.is_floating_point():
                raise ValueError(f"{name} has shape {list(array.shape)}, expected [{size}] integers")
        if softcap is not None and not softcap > 0:
            raise ValueError(f"softcap {softcap} is not above 0")
        if sink_logits is not None:
            if tuple(sink_logits.shape) != (heads,):
                raise ValueError(f"sink_logits has shape {list(sink_logits.shape)}, expected [{heads}]")
            sink_logits = sink_logits.to(queries.dtype)
        finite = [bool(torch.isfinite(head).all()) for head in values]
        return cls(queries, keys, values, steps, rows, first_visible, scale, softcap, sink_logits, finite)

    @property
    def heads(self) -> int:
        return int(self.queries.shape[0])

    @property
    def kv_heads(self) -> int:
        return int(self.keys.shape[0])

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    def parts(self, block: int | None) -> Iterator[slice]:
        """Blocks of steps in order."""
        if block is not None and block < 1:
            raise ValueError(f"a block of {block} steps")
        size = block or max(1, QUERY_ROWS // self.group)
        count = int(self.steps.numel())
        return (slice(start, min(start + size, count)) for start in range(0, count, size))

    def query_heads_of(self, kv_head: int) -> slice:
        return slice(kv_head * self.group, (kv_head + 1) * self.group)

    def sinks(self, group: slice, part: slice) -> Tensor | None:
        """Sink logit of every query of the block, [G b]."""
        if self.sink_logits is None:
            return None
        return self.sink_logits[group].repeat_interleave(part.stop - part.start)

    def logits(self, kv_head: int, part: slice, seen: _Seen) -> Tensor:
        """[n, G b], -inf where invisible."""
        queries = self.queries[self.query_heads_of(kv_head), part].reshape(-1, self.queries.shape[2])
        logits = seen.pick(self.keys[kv_head]) @ queries.T
        logits *= self.scale
        if self.softcap is not None:
            logits = logits.div_(self.softcap).tanh_().mul_(self.softcap)
        if seen.partial.numel():
            hidden = (~seen.visible).repeat(1, self.group)
            logits[seen.partial] = logits[seen.partial].masked_fill(hidden, float("-inf"))
        return logits
