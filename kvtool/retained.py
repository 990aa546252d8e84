"""RetainedSet: what an eviction run kept, as one integer per token."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

FACTORISATION, DEADLINE = 1, 2  # reasons of Event.fallback
MOST_NEAR = 4096  # near ties of a head that are listed: with more, scores are so coarse that rounding decides nothing


@dataclass(frozen=True, eq=False)
class Event:
    """One eviction of one layer.

    Attributes:
        step: e; the event ran before query e.
        candidates: [N] or [Hk, N] int64 rows that could be evicted (before the event); None under a schedule of
            several events, where `evict_step` says it.
        budget: [Hk] tokens each KV head was allowed.
        achieved: [Hk] tokens each KV head kept.
        ties: [Hk] tokens whose fate a tie decided.
        margin: [Hk] float64, lowest kept unprotected score minus highest evicted one;
            NaN where nothing unprotected was kept or nothing evicted.
        relative_margin: [Hk] float64, the margin relative to the scores about the cut; NaN where it is none
            or infinite.
        near: per KV head the rows of unprotected tokens that rounding could have put on the other side of the cut.
        sinks, window: protection in force: first rows, newest rows.
        overfull: protection exceeded the budget in some head.
        ranking: [Hk, N] int64, 1 = kept last, over all candidates (protected first);
            None for policies whose sets are not nested in the budget, and under a schedule of several events.
        diagnostics: name -> [H], what the policy says of how it worked.
        found: [Hk] candidates there were.
        fallback: [Hk] int64, why the sliding window decided instead of the policy: 0 where it did not, FACTORISATION
            or DEADLINE.
        seconds: stage -> wall-clock seconds; empty unless they were asked for.
        temporary_bytes: most bytes of tensors alive at once beside what the event began with, None unless asked for.
    """

    step: int
    candidates: Tensor | None
    budget: Tensor
    achieved: Tensor
    ties: Tensor
    margin: Tensor
    relative_margin: Tensor
    near: list[Tensor]
    sinks: int
    window: int
    overfull: bool = False
    ranking: Tensor | None = None
    diagnostics: dict[str, Tensor] = field(default_factory=dict)
    found: Tensor | None = None
    fallback: Tensor | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    temporary_bytes: int | None = None


@dataclass(frozen=True, eq=False)
class RetainedSet:
    """Eviction is monotone: `evict_step[h, p]` says everything.

    Attributes:
        evict_step: [Hk, T] int32; token p is retained for query t iff p <= t < evict_step[h, p];
            T means never evicted.
        events: in order of step.
    """

    evict_step: Tensor
    events: list[Event] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return int(self.evict_step.shape[1])

    def retained(self, step: int) -> Tensor:
        """[Hk, T] bool, retained for query `step` (the layer's window not applied)."""
        rows = torch.arange(self.tokens)
        return (rows <= step)[None, :] & (step < self.evict_step)

    def digest(self) -> str:
        """SHA-256 of `evict_step`: equal digests mean equal decisions."""
        array = np.ascontiguousarray(self.evict_step.numpy(), dtype="<i4")
        return hashlib.sha256(repr(array.shape).encode() + array.tobytes()).hexdigest()

    @classmethod
    def keep_all(cls, kv_heads: int, tokens: int) -> RetainedSet:
        return cls(torch.full((kv_heads, tokens), tokens, dtype=torch.int32))
