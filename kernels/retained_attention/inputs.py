"""Checked arguments of attention, and the logits of one block of steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

QUERY_ROWS = 256  # queries of one KV head in a block: enough for a fast product, small enough for the cache
RESULT_NUMBERS = 1 << 24  # outputs of all cells of a block: 64 MiB in float32


def expect_evict_steps(evict_steps: Tensor, keys: Tensor) -> None:
    """Raises ValueError unless `evict_steps` are integers [C, Hk, N] of keys [Hk, N, D]."""
    if evict_steps.ndim != 3 or tuple(evict_steps.shape[1:]) != tuple(keys.shape[:2]):
        raise ValueError(f"evict_steps {list(evict_steps.shape)} is not [C, Hk, N] of keys {list(keys.shape)}")
    if evict_steps.is_floating_point():
        raise ValueError("evict_steps must be integers")


@dataclass(frozen=True, eq=False)
class Seen:
    """Which keys a block of steps sees: columns invisible to all of them are left out."""

    columns: slice | Tensor  # n of the N keys
    partial: Tensor  # [n'] positions among the n that only some of the steps see
    visible: Tensor  # [n', b] which of the steps

    @classmethod
    def of(cls, inputs: Inputs, part: slice) -> Seen:
        steps, first = inputs.steps[part], inputs.first_visible[part]
        visible = (first[None, :] <= inputs.rows[:, None]) & (inputs.rows[:, None] <= steps[None, :])  # [N, b]
        index = visible.any(1).nonzero()[:, 0]
        columns = _columns(index)
        visible = visible[columns]
        partial = (~visible.all(1)).nonzero()[:, 0]
        return cls(columns, partial, visible[partial])

    @classmethod
    def between(cls, inputs: Inputs, part: slice) -> Seen:
        """All keys from the oldest that some step sees to the newest, whether or not a step sees every one."""
        steps, first = inputs.steps[part], inputs.first_visible[part]
        none = inputs.rows.new_zeros(0)
        if not steps.numel():
            return cls(slice(0, 0), none, none)
        index = ((inputs.rows >= first.min()) & (inputs.rows <= steps.max())).nonzero()[:, 0]
        return cls(_columns(index), none, none)

    def pick(self, array: Tensor) -> Tensor:
        """The seen rows [n, ...] of `array` [N, ...]."""
        return array[self.columns]


def _columns(index: Tensor) -> slice | Tensor:
    """`index` as a slice where it is one run, the usual case: no copy."""
    if index.numel() == 0:
        return slice(0, 0)
    if int(index[-1]) - int(index[0]) + 1 == index.numel():
        return slice(int(index[0]), int(index[-1]) + 1)
    return index


@dataclass(frozen=True, eq=False)
class Inputs:
    """Checked arguments, named as in `reference.attention`."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    steps: Tensor
    rows: Tensor
    first_visible: Tensor
    scale: float
    softcap: float | None
    sink_logits: Tensor | None
    block: int | None
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
        block: int | None,
    ) -> Inputs:
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
        if block is not None and block < 1:
            raise ValueError(f"a block of {block} steps")
        finite = [bool(torch.isfinite(head).all()) for head in values]
        return cls(queries, keys, values, steps, rows, first_visible, scale, softcap, sink_logits, block, finite)

    @cached_property
    def least_values(self) -> list[float]:
        """Per KV head the largest channel of the token where that is smallest, zeros apart; 1 where all are zero."""
        sizes = [head.abs().amax(1) for head in self.values] if self.values.shape[2] else []
        found = [float(mine[mine > 0].min()) if bool((mine > 0).any()) else 1.0 for mine in sizes]
        return found or [1.0] * self.kv_heads

    @property
    def heads(self) -> int:
        return int(self.queries.shape[0])

    @property
    def kv_heads(self) -> int:
        return int(self.keys.shape[0])

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    def parts(self, cells: int = 1) -> Iterator[slice]:
        """Blocks of steps in order, shorter where many cells would make the outputs of one block large."""
        fits = RESULT_NUMBERS // max(1, cells * self.heads * int(self.values.shape[2]))
        size = self.block or max(1, min(QUERY_ROWS // self.group, max(fits, 16)))
        count = int(self.steps.numel())
        return (slice(start, min(start + size, count)) for start in range(0, count, size))

    def query_heads_of(self, kv_head: int) -> slice:
        return slice(kv_head * self.group, (kv_head + 1) * self.group)

    def sinks(self, group: slice, part: slice) -> Tensor | None:
        """Sink logit of every query of the block, [G b]."""
        if self.sink_logits is None:
            return None
        return self.sink_logits[group].repeat_interleave(part.stop - part.start)

    def logits(self, kv_head: int, part: slice, seen: Seen) -> Tensor:
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
