"""How far attention's output moved, relative to the output itself: per query head and per layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from kvtool.layer import Geometry
from kvtool.metrics.metric import Column, Metric, Number, by_cell, mean_of_defined
from kvtool.metrics.step_errors import StepErrors, stacked
from kvtool.retained import RetainedSet

QUANTILES = {"p50": 0.50, "p95": 0.95, "p99": 0.99, "max": 1.0}


def relative(squared_error: Tensor, squared_output: Tensor) -> Tensor:
    """sqrt(sum of squared errors / sum of squared outputs) over the last axis; NaN where no output is."""
    return (squared_error.sum(-1) / _or_nan(squared_output.sum(-1))).sqrt()


def nanquantiles(values: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
    """Quantiles [Q, ...] of `values` [..., n] at `shares` [Q], linear between neighbours, NaN left out: as
    torch.nanquantile, whose sort takes several times as long. And [...] int64, how many were NaN."""
    ordered = torch.from_numpy(np.sort(values.numpy(), axis=-1))  # NaN last
    undefined = torch.isnan(values).sum(-1)
    last = (values.shape[-1] - 1 - undefined).clamp_min(0)  # with none defined the first is NaN
    places = shares.view(-1, *[1] * last.ndim) * last  # [Q, ...]
    low, high = places.floor().to(torch.int64), places.ceil().to(torch.int64)
    below, above = (ordered.gather(-1, at.movedim(0, -1).contiguous()).movedim(-1, 0) for at in (low, high))
    return torch.lerp(below, above, places - low), undefined


def _or_nan(squares: Tensor) -> Tensor:
    return torch.where(squares > 0, squares, float("nan"))


@dataclass(frozen=True)
class OutputError(Metric):
    """`output_error` = sqrt(sum_t |e_t|^2 / sum_t |f_V(q_t)|^2) per query head, and quantiles of |e_t| / |f_V(q_t)|."""

    name: ClassVar[str] = "output_error"
    columns: ClassVar[tuple[Column, ...]] = (
        Column("output_error", "head", "relative L2", "lower", "error of the head's output over all evaluated steps"),
        *(
            Column(f"output_error_{q}", "head", "relative L2", "lower", f"the same step by step, {words}")
            for q, words in (
                ("p50", "median"),
                ("p95", "95th percentile"),
                ("p99", "99th percentile"),
                ("max", "worst step"),
            )
        ),
        Column("undefined_steps", "head", "steps", "none", "steps whose output over all visible tokens is zero"),
        Column("mean_output_error", "cell", "relative L2", "lower", "mean of output_error over layers and query heads"),
        Column("undefined_heads", "cell", "heads", "none", "heads left out of mean_output_error"),
    )

    def partial(self, errors: StepErrors, geometry: Geometry, retained: RetainedSet) -> dict[str, Tensor]:
        return self.partials([errors], geometry, [retained])[0]

    def partials(
        self, errors: Sequence[StepErrors], geometry: Geometry, retained: Sequence[RetainedSet]
    ) -> list[dict[str, Tensor]]:
        squared = stacked([mine.squared_error for mine in errors])  # [C, H, n]
        output = stacked([mine.squared_output for mine in errors])  # [C or 1, H, n]
        by_step = (squared / _or_nan(output)).sqrt()
        found = {"output_error": relative(squared, output)}
        shares = torch.tensor(list(QUANTILES.values()), dtype=by_step.dtype)
        quantiles, undefined = nanquantiles(by_step, shares)  # one sort for all
        found |= {f"output_error_{suffix}": values for suffix, values in zip(QUANTILES, quantiles, strict=True)}
        found["undefined_steps"] = undefined
        return by_cell(found, len(errors))

    def combine(self, partials: Sequence[dict[str, Tensor]]) -> dict[str, Number]:
        heads = torch.cat([partial["output_error"] for partial in partials])
        return {"mean_output_error": mean_of_defined(heads), "undefined_heads": int(torch.isnan(heads).sum())}


@dataclass(frozen=True)
class LayerError(Metric):
    """`layer_error`: the same of o_t = sum_h W_O^h f^h(q_t), the heads summed before the norm.

    Errors of heads that cancel in the projection cancel here; biases cancel always and are left
    out of the denominator.
    """

    name: ClassVar[str] = "layer_error"
    columns: ClassVar[tuple[Column, ...]] = (
        Column("layer_error", "layer", "relative L2", "lower", "error of the layer's projected output"),
        Column("mean_layer_error", "cell", "relative L2", "lower", "mean of layer_error over layers"),
        Column("undefined_layers", "cell", "layers", "none", "layers left out of mean_layer_error"),
    )

    def partial(self, errors: StepErrors, geometry: Geometry, retained: RetainedSet) -> dict[str, Tensor]:
        return self.partials([errors], geometry, [retained])[0]

    def partials(
        self, errors: Sequence[StepErrors], geometry: Geometry, retained: Sequence[RetainedSet]
    ) -> list[dict[str, Tensor]]:
        error = [mine.layer_squared_error for mine in errors if mine.layer_squared_error is not None]
        output = [mine.layer_squared_output for mine in errors if mine.layer_squared_output is not None]
        if len(error) < len(errors) or len(output) < len(errors):  # there is a projection for all, or for none
            nothing = torch.full((len(errors),), float("nan"), dtype=torch.float64)
            return by_cell({"layer_error": nothing}, len(errors))
        return by_cell({"layer_error": relative(stacked(error), stacked(output))}, len(errors))

    def combine(self, partials: Sequence[dict[str, Tensor]]) -> dict[str, Number]:
        layers = torch.stack([partial["layer_error"].reshape(()) for partial in partials])
        return {"mean_layer_error": mean_of_defined(layers), "undefined_layers": int(torch.isnan(layers).sum())}
