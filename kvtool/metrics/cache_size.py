"""Cache size: how many tokens every query finds in the cache, from `evict_step` alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from kvtool.layer import Geometry
from kvtool.metrics.metric import Column, Level, Metric, Number
from kvtool.metrics.step_errors import StepErrors
from kvtool.retained import RetainedSet

NAMES = ("mean_cache_tokens", "peak_cache_tokens", "mean_cache_bytes", "peak_cache_bytes")


def leaving_steps(geometry: Geometry, tokens: int) -> Tensor:
    """[T] int64, the first step whose query no longer sees each row by the layer's window; T where none is."""
    rows = torch.arange(tokens)
    if geometry.kind == "sliding" and geometry.window is not None:
        return (rows + geometry.window).clamp_max(tokens)
    if geometry.kind == "chunked" and geometry.window is not None:
        return ((rows // geometry.window + 1) * geometry.window).clamp_max(tokens)
    return torch.full_like(rows, tokens)


def live_tokens(evict_step: Tensor, geometry: Geometry) -> Tensor:
    """[Hk, T] int64, tokens retained and visible to the query of each step, its own included.

    Args:
        evict_step: [Hk, T].
    """
    heads, tokens = evict_step.shape
    gone = torch.minimum(evict_step.to(torch.int64), leaving_steps(geometry, tokens)).maximum(torch.arange(tokens))
    left = torch.empty(heads, tokens, dtype=torch.int64)
    for head, mine in enumerate(gone.numpy()):
        left[head] = torch.from_numpy(np.bincount(mine, minlength=tokens)[:tokens].cumsum())
    return torch.arange(1, tokens + 1) - left  # row p is written at step p


def bytes_per_token(geometry: Geometry) -> int:
    """Bytes of one token's key and value in one KV head, as the trace stores them; 0 where another layer's cache is
    read, since that layer counts them."""
    return 0 if geometry.kv_source is not None else (geometry.key_dim + geometry.value_dim) * geometry.element_bytes


def _columns(level: Level, whose: str) -> tuple[Column, ...]:
    """The four columns, of a layer or of all."""
    found = f"tokens that a query finds in one of {whose} KV heads, its own included"
    return (
        Column(NAMES[0], level, "tokens", "none", found),
        Column(NAMES[1], level, "tokens", "none", "the most that a query finds in any of them"),
        Column(NAMES[2], level, "bytes", "none", f"keys and values in {whose} KV heads together, mean over steps"),
        Column(NAMES[3], level, "bytes", "none", "the most at any step"),
    )


@dataclass(frozen=True)
class CacheSize(Metric):
    """Mean and peak over the evaluated steps of the tokens in a KV head's cache, and of the bytes of K and V."""

    name: ClassVar[str] = "cache_size"
    columns: ClassVar[tuple[Column, ...]] = (*_columns("layer", "the layer's"), *_columns("cell", "all layers'"))

    def partial(self, errors: StepErrors, geometry: Geometry, retained: RetainedSet) -> dict[str, Tensor]:
        """The layer columns, and `held_bytes` [n] at the `steps` [n], since peaks of layers need not coincide."""
        live = live_tokens(retained.evict_step, geometry)[:, errors.steps]  # [Hk, n]
        held = live.sum(0) * bytes_per_token(geometry)
        sizes = dict.fromkeys(NAMES, torch.tensor(torch.nan, dtype=torch.float64))
        if errors.steps.numel():
            exact = (live.to(torch.float64), held.to(torch.float64))
            values = [size for one in exact for size in (one.mean(), one.max())]
            sizes = dict(zip(NAMES, values, strict=True))
        return {**sizes, "heads": torch.tensor(geometry.kv_heads), "held_bytes": held, "steps": errors.steps}

    def combine(self, partials: Sequence[dict[str, Tensor]]) -> dict[str, Number]:
        """Tokens: mean and maximum over all KV heads. Bytes: summed over layers step by step, over the steps that
        were evaluated in every layer; None where there is none."""
        found: dict[str, Number] = dict.fromkeys(NAMES)
        if any(not partial["steps"].numel() for partial in partials):
            return found
        heads = torch.stack([partial["heads"] for partial in partials]).to(torch.float64)
        means = torch.stack([partial[NAMES[0]] for partial in partials])
        found[NAMES[0]] = float((means * heads).sum() / heads.sum())
        found[NAMES[1]] = max(float(partial[NAMES[1]]) for partial in partials)
        steps, times = torch.cat([partial["steps"] for partial in partials]).unique(return_counts=True)
        common = steps[times == len(partials)]
        if common.numel():
            places = [torch.isin(partial["steps"], common) for partial in partials]
            each = [partial["held_bytes"][place] for partial, place in zip(partials, places, strict=True)]
            held = torch.stack(each).sum(0).to(torch.float64)
            found |= {NAMES[2]: float(held.mean()), NAMES[3]: float(held.max())}
        return found
