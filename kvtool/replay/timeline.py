"""Timeline: errors and cache sizes over the steps of a sequence, in bins that all its cells and layers share."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from kvtool.layer import Geometry
from kvtool.metrics import PredictedKL, StepErrors, Whole
from kvtool.metrics.cache_size import live_tokens
from kvtool.metrics.metric import mean_of_defined
from kvtool.metrics.output_error import relative
from kvtool.retained import RetainedSet

MOST_BINS = 32
NAME = "timeline"  # among what a part stores of a cell
Stored = dict[str, dict[str, Tensor]]


def bins(first: int, length: int, width: int | None = None) -> list[tuple[int, int]]:
    """Half-open spans of steps from the first evaluated one to the end of the sequence.

    Args:
        width: steps per bin; None is the least that needs no more than 32 bins. The last bin may be short.
    """
    width = width or -(-(length - first) // MOST_BINS)
    return list(itertools.pairwise([*range(first, length, width), length]))


def binned(
    found: StepErrors, retained: RetainedSet, geometry: Geometry, spans: list[tuple[int, int]]
) -> dict[str, Tensor]:
    """What is stored of one layer and cell; NaN where a bin has no evaluated step.

    Returns:
        `output_error`, `evicted_mass` [H, B], `layer_error` [B], `mean_cache_tokens`, `peak_cache_tokens` [Hk, B],
        float64, and `bins` [B, 2].
    """
    live = live_tokens(retained.evict_step, geometry)[:, found.steps].to(torch.float64)  # [Hk, n]
    heads, kv_heads, count = found.mass.shape[0], live.shape[0], len(spans)

    def unknown(*shape: int) -> Tensor:
        return torch.full((*shape, count), torch.nan, dtype=torch.float64)

    stored = {
        "output_error": unknown(heads),
        "evicted_mass": unknown(heads),
        "layer_error": unknown(),
        "mean_cache_tokens": unknown(kv_heads),
        "peak_cache_tokens": unknown(kv_heads),
        "bins": torch.tensor(spans, dtype=torch.int64).view(-1, 2),
    }
    bounds = torch.searchsorted(found.steps, stored["bins"])
    for index, (low, high) in enumerate(bounds.tolist()):
        if low == high:
            continue
        here = slice(low, high)
        stored["output_error"][:, index] = relative(found.squared_error[:, here], found.squared_output[:, here])
        stored["evicted_mass"][:, index] = found.mass[:, here].mean(-1)
        stored["mean_cache_tokens"][:, index] = live[:, here].mean(-1)
        stored["peak_cache_tokens"][:, index] = live[:, here].amax(-1)
        if found.layer_squared_error is not None and found.layer_squared_output is not None:
            stored["layer_error"][index] = relative(found.layer_squared_error[here], found.layer_squared_output[here])
    return stored


def timeline_entries(key: dict[str, Any], layer_ids: list[int], wholes: list[Stored]) -> list[dict[str, Any]]:
    """One entry per bin and layer, and per bin one over all layers (`layer` null).

    Args:
        key: key columns of the cell and sequence.
        wholes: what the layers' parts stored of the cell, `NAME` and `PredictedKL` among it.
    """
    entries = []
    stored = [whole[NAME] for whole in wholes]
    for layer_id, one in zip(layer_ids, stored, strict=True):
        for index, (start, stop) in enumerate(one["bins"].tolist()):
            if not bool(one["mean_cache_tokens"][:, index].isnan().all()):
                place = {**key, "layer": layer_id, "step_from": start, "step_to": stop}
                entries.append({**place, **_means([one], index), "layer_error": _mean(one["layer_error"][index])})
    whole = Whole.of([each[PredictedKL.name] for each in wholes])
    for index, (start, stop) in enumerate(stored[0]["bins"].tolist()):
        found = _means(stored, index)
        if found["mean_cache_tokens"] is None:
            continue
        drawn, kl = (0, None) if whole is None else whole.between(start, stop)
        entries.append(
            {
                **key,
                "layer": None,
                "step_from": start,
                "step_to": stop,
                **found,
                "mean_layer_error": _mean(torch.stack([one["layer_error"][index] for one in stored])),
                "predicted_kl": kl,
                "predicted_kl_steps": drawn,
            }
        )
    return entries


def _means(stored: list[dict[str, Tensor]], index: int) -> dict[str, Any]:
    """Means over all heads of these layers, every head counting the same."""
    values = {
        name: torch.cat([one[name][:, index] for one in stored])
        for name in ("output_error", "evicted_mass", "mean_cache_tokens", "peak_cache_tokens")
    }
    peaks = values.pop("peak_cache_tokens")
    known = peaks[~peaks.isnan()]
    found: dict[str, Any] = {name: _mean(value) for name, value in values.items()}
    return {**found, "peak_cache_tokens": float(known.max()) if known.numel() else None}


def _mean(values: Tensor) -> float | None:
    return mean_of_defined(values.reshape(-1))
