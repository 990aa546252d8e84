"""What changed in attention: how much of it was lost, in which direction, and how the output turned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvtool.layer import Geometry
from kvtool.metrics.metric import Column, Metric, by_cell
from kvtool.metrics.step_errors import StepErrors, stacked
from kvtool.retained import RetainedSet


@dataclass(frozen=True)
class CosineDistance(Metric):
    """1 - cos(f_V, f_R), mean over steps. Blind to length: a halved output has distance 0, so never read it alone."""

    name: ClassVar[str] = "cosine_distance"
    columns: ClassVar[tuple[Column, ...]] = (
        Column("cosine_distance", "head", "1 - cosine", "lower", "how far the output turned, its length ignored"),
    )

    def partial(self, errors: StepErrors, geometry: Geometry, retained: RetainedSet) -> dict[str, Tensor]:
        return self.partials([errors], geometry, [retained])[0]

    def partials(
        self, errors: Sequence[StepErrors], geometry: Geometry, retained: Sequence[RetainedSet]
    ) -> list[dict[str, Tensor]]:
        return by_cell({"cosine_distance": torch.nanmean(stacked([mine.cosine for mine in errors]), -1)}, len(errors))


@dataclass(frozen=True)
class EvictedMass(Metric):
    """m_t, the attention that evicted tokens would have received, mean over steps."""

    name: ClassVar[str] = "evicted_mass"
    columns: ClassVar[tuple[Column, ...]] = (
        Column("evicted_mass", "head", "share of attention", "lower", "attention lost with the evicted tokens"),
    )

    def partial(self, errors: StepErrors, geometry: Geometry, retained: RetainedSet) -> dict[str, Tensor]:
        return self.partials([errors], geometry, [retained])[0]

    def partials(
        self, errors: Sequence[StepErrors], geometry: Geometry, retained: Sequence[RetainedSet]
    ) -> list[dict[str, Tensor]]:
        return by_cell({"evicted_mass": stacked([mine.mass for mine in errors]).mean(-1)}, len(errors))


@dataclass(frozen=True)
class DirectionGap(Metric):
    """|fE_t - f_R(q_t)|, mean over steps that lost attention. Error at a step is lost mass times this gap."""

    name: ClassVar[str] = "direction_gap"
    columns: ClassVar[tuple[Column, ...]] = (
        Column("direction_gap", "head", "output units", "lower", "distance of what was lost from what was kept"),
    )

    def partial(self, errors: StepErrors, geometry: Geometry, retained: RetainedSet) -> dict[str, Tensor]:
        return self.partials([errors], geometry, [retained])[0]

    def partials(
        self, errors: Sequence[StepErrors], geometry: Geometry, retained: Sequence[RetainedSet]
    ) -> list[dict[str, Tensor]]:
        return by_cell({"direction_gap": torch.nanmean(stacked([mine.gap for mine in errors]), -1)}, len(errors))
