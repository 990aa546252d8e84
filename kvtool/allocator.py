"""Allocator: splits a budget over heads and layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from kvtool.budget import Budget

Scope = Literal["head", "layer", "trace"]


class Allocator(Protocol):
    """Says how many of `candidates` tokens each KV head of a layer keeps.

    Attributes:
        scope: what must be scored before it can answer; `head` needs no scores at all.
    """

    @property
    def scope(self) -> Scope: ...

    def allocate(self, budget: Budget, candidates: int, kv_heads: int) -> list[int]: ...


@dataclass(frozen=True)
class Uniform:
    """The same count in every KV head of every layer: what all policies here assume."""

    scope: Scope = "head"

    def allocate(self, budget: Budget, candidates: int, kv_heads: int) -> list[int]:
        return [budget.resolve(candidates)] * kv_heads
