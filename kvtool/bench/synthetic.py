"""Synthetic: attention inputs that look like a model's, made from a seed.

Trained models have what plain noise lacks: an attention sink at the first token, a few channels in
which all keys are large, queries that share a direction, and tokens that matter far more than others.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvtool.layer import Geometry, Layer

SINKS, RECENT = 4, 32  # never evicted, as in replay
RATIOS = (0.5, 0.7, 0.8, 0.9, 0.95)
POLICIES = 10


@dataclass(frozen=True)
class Heads:
    """Query heads and KV heads of a model's layer, or as many of them as are timed."""

    name: str
    query_heads: int
    kv_heads: int
    dim: int


SMOLLM2 = Heads("SmolLM2-like", 9, 3, 64)
LLAMA = Heads("Llama-8B-like, one KV head", 4, 1, 128)


@dataclass(frozen=True, eq=False)
class Case:
    """What attention is asked: R queries after N tokens, so that every query sees them all.

    Attributes:
        queries: [H, R, D].
        keys: [Hk, N, D], values: [Hk, N, Dv].
        scale: factor on q·k.
        softcap, sink_logits: as in Geometry.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    scale: float
    softcap: float | None = None
    sink_logits: Tensor | None = None

    @property
    def tokens(self) -> int:
        return int(self.keys.shape[1])

    @property
    def grouped(self) -> Tensor:
        """[Hk, G R, D], the query rows of every KV head, a view."""
        heads, count, dim = self.queries.shape
        kv_heads = int(self.keys.shape[0])
        return self.queries.reshape(kv_heads, heads // kv_heads * count, dim)

    @property
    def steps(self) -> Tensor:
        """[R], all of them after the tokens."""
        return self.tokens + torch.arange(self.queries.shape[1])

    @property
    def never(self) -> int:
        """An evict_step behind every query."""
        return self.tokens + int(self.queries.shape[1])


def arrays(heads: Heads, tokens: int, queries: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [H, R, D], keys and values [Hk, N, D], float32."""
    make = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=make)

    group, dim = heads.query_heads // heads.kv_heads, heads.dim
    shared = noise(heads.kv_heads, 1, dim)
    shared /= shared.norm(dim=-1, keepdim=True)
    outliers = torch.zeros(heads.kv_heads, 1, dim)
    outliers[:, :, torch.randperm(dim, generator=make)[: max(1, dim // 32)]] = 6.0  # large, the same in every key
    keys = noise(heads.kv_heads, tokens, dim) + outliers
    keys += 1.5 * noise(heads.kv_heads, tokens, 1) * shared  # how much a token matters to all queries alike
    keys[:, :1] = 3.0 * dim**0.5 * shared - 0.5 * outliers
    values = noise(heads.kv_heads, tokens, dim) * (0.5 + torch.rand(heads.kv_heads, tokens, 1, generator=make))
    values[:, :1] *= 0.05  # a sink takes attention and gives nothing
    toward = (2.0 + torch.rand(heads.query_heads, queries, 1, generator=make)) * shared.repeat_interleave(group, 0)
    return noise(heads.query_heads, queries, dim) + toward, keys, values


def case(heads: Heads, tokens: int, queries: int, seed: int = 0) -> Case:
    """A case of these heads."""
    return Case(*arrays(heads, tokens, queries, seed), scale=heads.dim**-0.5)


def case_of(layer: Layer, most_queries: int) -> Case:
    """A stored layer's own arrays: its last queries, over the keys before the first of them, on layers without
    window (the window of others is left out, so that all queries see the same tokens)."""
    geometry: Geometry = layer.geometry
    late = layer.query_steps > layer.tokens // 2
    chosen = late.nonzero()[-most_queries:, 0]
    if not chosen.numel():
        chosen = torch.arange(layer.query_steps.numel())[-most_queries:]
    before = max(1, int(layer.query_steps[chosen[0]]))
    return Case(
        layer.queries[:, chosen].contiguous(),
        layer.keys[:, :before].contiguous(),
        layer.values[:, :before].contiguous(),
        geometry.scale,
        geometry.softcap,
        geometry.sink_logits,
    )


def orders(case: Case, policies: int, seed: int = 0) -> Tensor:
    """[P, Hk, N] int64, rankings as policies give them, best first: sinks and newest tokens, then a mixture of what
    queries look for, small keys, recency and noise, mixed otherwise by each policy."""
    make = np.random.default_rng(seed)
    kv_heads, tokens = case.keys.shape[:2]
    centre = case.grouped.mean(1, keepdim=True)  # [Hk, 1, D]
    signals = [
        (case.keys @ centre.transpose(1, 2))[..., 0],
        -case.keys.norm(dim=-1),
        torch.arange(tokens, dtype=torch.float32).expand(kv_heads, -1),
    ]
    signals = [(s - s.mean(1, keepdim=True)) / s.std(1, keepdim=True).clamp_min(1e-6) for s in signals]
    found = torch.empty(policies, kv_heads, tokens, dtype=torch.int64)
    for policy in range(policies):
        score = torch.from_numpy(make.standard_normal((kv_heads, tokens)).astype(np.float32))
        for weight, signal in zip(make.dirichlet(np.ones(3)) * 2, signals, strict=True):
            score += float(weight) * signal
        score[:, :SINKS] = torch.inf
        score[:, tokens - min(RECENT, tokens) :] = torch.inf
        found[policy] = score.argsort(dim=1, descending=True, stable=True)
    return found


def nested(ranked: Tensor, ratios: tuple[float, ...], never: int) -> Tensor:
    """[P · ratios, Hk, N] evict_step of prefixes of rankings [P, Hk, N]: evicted before the first query, or never."""
    tokens = ranked.shape[2]
    cells = torch.full((ranked.shape[0], len(ratios), *ranked.shape[1:]), tokens)
    for i, ratio in enumerate(ratios):
        kept = ranked[:, :, : tokens - int(ratio * tokens)]
        cells[:, i] = cells[:, i].scatter(2, kept, never)
    return cells.flatten(0, 1)
