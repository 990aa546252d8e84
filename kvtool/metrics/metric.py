"""Metric: the base class of everything that is measured, and Column, what a table calls it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvtool.layer import Geometry
from kvtool.metrics.step_errors import StepErrors
from kvtool.retained import RetainedSet

Level = Literal["head", "layer", "cell", "kv_head"]
Direction = Literal["lower", "higher", "none"]
Number = float | int | None


@dataclass(frozen=True)
class Column:
    """One column of a result.

    Attributes:
        level: what one value speaks of: a query head of a layer, a layer, a cell, or (ages) a KV head.
        unit: in words.
        direction: which way is better, `none` where neither is.
        meaning: one phrase.
        share: a part of the cell's number, known only once all layers are: handed out by `shares`.
    """

    name: str
    level: Level
    unit: str
    direction: Direction
    meaning: str
    share: bool = False


@dataclass(frozen=True)
class Metric:
    """A frozen dataclass; two steps, since some sums run over layers before they are squared.

    `partial` reduces one layer of one sequence and cell to tensors that are stored (so a stopped run
    can resume), `combine` puts the layers of the sequence together.

    Class attributes:
        name: the metric's word, also the prefix of its stored tensors.
        version: raised whenever stored values change their meaning; results of different
            versions are not compared.
        columns: of head and layer level, each stored by `partial` under its name (shares: handed out by
            `shares`); of cell level, each handed out by `combine`.
    """

    name: ClassVar[str]
    version: ClassVar[int] = 1
    columns: ClassVar[tuple[Column, ...]] = ()

    def partial(self, errors: StepErrors, geometry: Geometry, retained: RetainedSet) -> dict[str, Tensor]:
        """What is stored for one layer: its head columns [H] and layer columns [] by name, and whatever
        sums `combine` needs besides. NaN is undefined. Nothing that is shown may be changed.

        Args:
            errors: at least one evaluated step: all of a cell, or those from one event to the next.
            retained: what the cell kept in this layer, all its events included.
        """
        raise TypeError(f"{type(self).__name__} defines no partial")

    def partials(
        self, errors: Sequence[StepErrors], geometry: Geometry, retained: Sequence[RetainedSet]
    ) -> list[dict[str, Tensor]]:
        """`partial` of several cells of one layer that were evaluated at the same steps, one after the other; a
        metric that is faster on all of them at once says so here, and must find the same."""
        return [self.partial(mine, geometry, kept) for mine, kept in zip(errors, retained, strict=True)]

    def combine(self, partials: Sequence[dict[str, Tensor]]) -> dict[str, Number]:
        """The cell columns of one sequence from the partials of its layers; None is undefined."""
        return {}

    def shares(self, partials: Sequence[dict[str, Tensor]]) -> dict[str, list[Tensor]]:
        """Share columns of one sequence: name -> per layer [H], NaN where undefined. A layer's is their sum."""
        return {}

    def average(self, cells: Sequence[dict[str, Number]]) -> dict[str, Number]:
        """The cell columns of several sequences from what `combine` said of each: means."""
        return mean_over_sequences(cells)


def by_cell(found: dict[str, Tensor], cells: int) -> list[dict[str, Tensor]]:
    """Stacked answers [C, ...], or one answer [1, ...] for all, as the answer [...] of every cell."""
    each = {name: values.expand(cells, *values.shape[1:]).unbind(0) for name, values in found.items()}
    return [{name: values[cell] for name, values in each.items()} for cell in range(cells)]


def nullable(values: Tensor) -> list[Number]:
    """A tensor [n] (or of one element) as numbers that JSON can say: NaN becomes None, counts stay whole."""
    return [None if isinstance(v, float) and math.isnan(v) else v for v in values.reshape(-1).tolist()]


def mean_of_defined(values: Tensor) -> float | None:
    """The unweighted mean of what is defined, None where nothing is."""
    known = values[~torch.isnan(values)]
    return float(known.mean()) if known.numel() else None


def mean_over_sequences(cells: Sequence[dict[str, Number]]) -> dict[str, Number]:
    """The unweighted mean of each cell column over sequences, those where it is undefined left out."""
    means: dict[str, Number] = {}
    for name in dict.fromkeys(name for cell in cells for name in cell):
        known = [value for cell in cells if (value := cell.get(name)) is not None]
        means[name] = math.fsum(known) / len(known) if known else None
    return means
