"""CapKV: leverage of values weighted by their keys' agreement with the expected query."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvtool.policies.capacity import Capacity
from kvtool.policies.capacity_weights import Relevance, Response, Shift


@dataclass(frozen=True)
class CapKV(Capacity):
    """Weighs a token by exp(tau·cosine) of its key and the expected query, and keeps what adds most to the log-det
    capacity of the weighted values.

    Paper: Rethinking KV Cache Eviction via a Unified Information-Theoretic Objective, 2604.25975.
    Deviations: as kvpress's CapPress: cosine instead of the dot product, the maximum subtracted,
    the mean query turned to future positions, the first 4 tokens kept. The published formula is
    `capkv-paper`. Cost: O(H·(e·D^2 + N·(D^2 + Dv^2) + Dv^3)).

    The page docs/policies.md explains every parameter.
    """

    relevance: Relevance = "exp_cosine"
    tau: float = 5.0
    sensitivity: Literal["saturating", "none"] = "none"
    response: Response = "none"
    weight_eps: float = 1e-6
    exclude_first: int = 4


@dataclass(frozen=True)
class CapKVPaper(CapKV):
    """The published formula of CapKV: weights exp(tau·z) of the logit itself, nothing subtracted, nothing left out.

    Paper: Rethinking KV Cache Eviction via a Unified Information-Theoretic Objective, 2604.25975.
    Deviations: the logit carries the layer's scale and the mean query is turned to future
    positions, which the paper leaves open. Cost: as `capkv`. Logits are not bounded, so weights may
    overflow; then the fallback scores, and the run says so.

    The page docs/policies.md explains every parameter.
    """

    relevance: Relevance = "exp_dot"
    shift: Shift = "none"
    weight_eps: float = 0.0
    exclude_first: int = 0
    exclude_statistics: int = 0
