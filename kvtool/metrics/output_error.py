"""How far attention's output moved, relative to the output itself: per query head and per layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from kvtool.layer import Geometry
from kvtool.metrics.metric import Column, Metric, Number, mean_of_defined
from kvtool.metrics.step_errors import StepErrors
from kvtool.retained import RetainedSet

QUANTILES = {"p50": 0.50, "p95": 0.95, "p99": 0.99, "max": 1.0}


def relative(squared_error: Tensor, squared_output: Tensor) -> Tensor:
    """sqrt(sum of squared errors / sum of squared outputs) over the last axis; NaN where no output is."""
    return (squared_error.sum(-1) / _or_nan(squared_output.sum(-1))).sqrt()


def _or_nan(squares: Tensor) -> Tensor:
    return torch.where(squares > 0, squares, float("nan"))


def _quantiles(values: Tensor, undefined: Tensor) -> Tensor:
    """[Q, H] the QUANTILES of what is known in each row of `values` [H, n], linear between neighbours, NaN where
    nothing is; `undefined` [H] of them are NaN."""
    ascending = torch.from_numpy(np.sort(values.numpy(), axis=-1))  # NaN last; PyTorch's sort is far slower
    last = (values.shape[-1] - 1 - undefined).clamp_min(0).to(values.dtype)
    place = last[:, None] * torch.tensor(list(QUANTILES.values()), dtype=values.dtype)  # [H, Q]
    low = place.floor()
    below, above = (ascending.gather(-1, end.to(torch.int64)) for end in (low, place.ceil()))
    return torch.lerp(below, above, place - low).T


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
        by_step = (errors.squared_error / _or_nan(errors.squared_output)).sqrt()  # [H, n]
        found = {"output_error": relative(errors.squared_error, errors.squared_output)}
        undefined = torch.isnan(by_step).sum(-1)
        quantiles = _quantiles(by_step, undefined)
        found |= {f"output_error_{suffix}": values for suffix, values in zip(QUANTILES, quantiles, strict=True)}
        found["undefined_steps"] = undefined
        return found

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
        if errors.layer_squared_error is None or errors.layer_squared_output is None:
            return {"layer_error": torch.tensor(float("nan"), dtype=torch.float64)}
        return {"layer_error": relative(errors.layer_squared_error, errors.layer_squared_output)}

    def combine(self, partials: Sequence[dict[str, Tensor]]) -> dict[str, Number]:
        layers = torch.stack([partial["layer_error"].reshape(()) for partial in partials])
        return {"mean_layer_error": mean_of_defined(layers), "undefined_layers": int(torch.isnan(layers).sum())}
