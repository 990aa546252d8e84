"""What changed in attention: how much of it was lost, in which direction, and how the output turned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvtool.layer import Geometry
from kvtool.metrics.metric import Column, Metric
from kvtool.metrics.step_errors import StepErrors
from kvtool.retained import RetainedSet


@dataclass(frozen=True)
class CosineDistance(Metric):
    """1 - cos(f_V, f_R), mean over steps. Blind to length: a halved output has distance 0, so never read it alone."""

    name: ClassVar[str] = "cosine_distance"
    columns: ClassVar[tuple[Column, ...]] = (
        Column("cosine_distance", "head", "1 - cosine", "lower", "how far the output turned, its length ignored"),
    )

    def partial(self, errors: StepErrors, geometry: Geometry, retained: RetainedSet) -> dict[str, Tensor]:
        return {"cosine_distance": torch.nanmean(errors.cosine, -1)}


@dataclass(frozen=True)
class EvictedMass(Metric):
    """m_t, the attention that evicted tokens would have received, mean over steps."""

    name: ClassVar[str] = "evicted_mass"
    columns: ClassVar[tuple[Column, ...]] = (
        Column("evicted_mass", "head", "share of attention", "lower", "attention lost with the evicted tokens"),
    )

    def partial(self, errors: StepErrors, geometry: Geometry, retained: RetainedSet) -> dict[str, Tensor]:
        return {"evicted_mass": errors.mass.mean(-1)}


@dataclass(frozen=True)
class DirectionGap(Metric):
    """|fE_t - f_R(q_t)|, mean over steps that lost attention. Error at a step is lost mass times this gap."""

    name: ClassVar[str] = "direction_gap"
    columns: ClassVar[tuple[Column, ...]] = (
        Column("direction_gap", "head", "output units", "lower", "distance of what was lost from what was kept"),
    )

    def partial(self, errors: StepErrors, geometry: Geometry, retained: RetainedSet) -> dict[str, Tensor]:
        return {"direction_gap": torch.nanmean(errors.gap, -1)}
