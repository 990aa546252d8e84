"""TailError: an example metric."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvtool.layer import Geometry
from kvtool.metrics import Column, Metric, StepErrors
from kvtool.retained import RetainedSet


@dataclass(frozen=True)
class TailError(Metric):
    """The mean relative error over a head's worst steps, since a mean over all steps hides rare failures.

    Of every query head the steps are sorted by |e| / |f_V|; `tail_error` is the mean over the worst `share` of them, at
    least one. Steps whose output over all visible tokens is zero are left out.
    """

    share: float = 0.05

    name: ClassVar[str] = "tail_error"
    version: ClassVar[int] = 1
    columns: ClassVar[tuple[Column, ...]] = (
        Column("tail_error", "head", "relative L2", "lower", "mean of the relative error over the worst steps"),
        Column("mean_tail_error", "cell", "relative L2", "lower", "mean of tail_error over layers and query heads"),
    )

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError("share lies in 0..1, 0 excluded")

    def partial(self, errors: StepErrors, geometry: Geometry, retained: RetainedSet) -> dict[str, Tensor]:
        output = torch.where(errors.squared_output > 0, errors.squared_output, torch.nan)
        by_step = (errors.squared_error / output).sqrt()  # [H, n]
        return {"tail_error": torch.stack([self._tail(steps[~steps.isnan()]) for steps in by_step])}

    def _tail(self, steps: Tensor) -> Tensor:
        if not steps.numel():
            return torch.tensor(torch.nan, dtype=torch.float64)
        return steps.topk(math.ceil(self.share * steps.numel())).values.mean()

    def combine(self, partials: Sequence[dict[str, Tensor]]) -> dict[str, float | int | None]:
        heads = torch.cat([partial["tail_error"] for partial in partials])
        known = heads[~heads.isnan()]
        return {"mean_tail_error": float(known.mean()) if known.numel() else None}
