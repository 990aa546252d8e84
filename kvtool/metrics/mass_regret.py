"""mass_regret: evicted future attention summed over all budgets, against the best ranking there is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvtool.layer import Geometry
from kvtool.metrics.metric import Column, Metric
from kvtool.metrics.step_errors import StepErrors
from kvtool.retained import Event, RetainedSet

ROUNDING = 1e-12  # what float64 sums of the same numbers in two orders may differ by, relatively


def mass_regret(ranking: Tensor, mass: Tensor) -> list[float | None]:
    """sum_i (r_i - 1) M_i over the same sum under the ranking by M descending.

    A token of rank r is evicted at the r - 1 budgets below r, hence the weights. 1 is the oracle and
    nothing is below it. With no future mass beyond what every budget keeps: 1 for a ranking that
    loses none, None for one that loses some.

    Args:
        ranking: [Hk, n] distinct integers over the unprotected candidates; lower is kept longer.
        mass: [Hk, n] future attention of the same tokens, >= 0.

    Returns:
        One ratio per KV head.
    """
    ratios: list[float | None] = []
    for ranks, masses in zip(ranking, mass.to(torch.float64), strict=True):
        places = torch.arange(masses.numel(), dtype=torch.float64, device=masses.device)
        lost = float((places * masses[ranks.argsort(stable=True)]).sum())
        least = float((places * masses.sort(descending=True).values).sum())
        if least == 0:
            ratios.append(1.0 if lost == 0 else None)
        else:
            ratio = lost / least
            # No order loses less than the descending one; a ratio just below 1 is the rounding of equals.
            ratios.append(1.0 if 1.0 - ROUNDING < ratio < 1.0 else ratio)
    return ratios


def unprotected(event: Event) -> Tensor:
    """Which candidates of the event no protection covers, in the shape of `event.candidates`."""
    rows = event.candidates
    assert rows is not None
    return (rows >= event.sinks) & (rows < event.step - event.window)


@dataclass(frozen=True)
class MassRegret(Metric):
    """The ratio of `mass_regret` for a single event; undefined for several events, for policies whose
    sets are not nested in the budget, and where the future mass was not computed."""

    name: ClassVar[str] = "mass_regret"
    columns: ClassVar[tuple[Column, ...]] = (
        Column(
            "mass_regret",
            "head",
            "ratio >= 1",
            "lower",
            "future attention lost, summed over all budgets, against the best ranking (one value per KV head)",
        ),
    )

    def partial(self, errors: StepErrors, geometry: Geometry, retained: RetainedSet) -> dict[str, Tensor]:
        return self.partials([errors], geometry, [retained])[0]

    def partials(
        self, errors: Sequence[StepErrors], geometry: Geometry, retained: Sequence[RetainedSet]
    ) -> list[dict[str, Tensor]]:
        """Nested budgets share one ranking, so what is found of it serves them all."""
        known: dict[tuple[int, ...], Tensor] = {}
        found = []
        for mine, kept in zip(errors, retained, strict=True):
            event = kept.events[0] if len(kept.events) == 1 else None
            same: tuple[int, ...] = ()
            if event is not None and mine.future_mass is not None:
                # All of them live as long as this call: one address is one tensor.
                tensors = (id(event.ranking), id(event.candidates), id(mine.future_mass))
                same = (*tensors, event.step, event.sinks, event.window)
            if same not in known:
                known[same] = _regret_by_head(event, mine.future_mass, geometry)
            found.append({"mass_regret": known[same]})
        return found


def _regret_by_head(event: Event | None, future_mass: Tensor | None, geometry: Geometry) -> Tensor:
    """[H] float64, NaN where undefined."""
    ratios: list[float | None] = [None] * geometry.kv_heads
    if event is not None and event.ranking is not None and event.candidates is not None and future_mass is not None:
        candidates = event.candidates.expand(geometry.kv_heads, -1)
        free = unprotected(event).expand(geometry.kv_heads, -1)
        for head in range(geometry.kv_heads):
            ranks = event.ranking[head][free[head]]
            masses = future_mass[head][candidates[head][free[head]]]
            ratios[head] = mass_regret(ranks[None], masses[None])[0]
    per_head = torch.tensor([math.nan if r is None else r for r in ratios], dtype=torch.float64)
    return per_head.repeat_interleave(geometry.group)
