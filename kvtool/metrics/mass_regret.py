"""mass_regret: evicted future attention summed over all budgets, against the best ranking there is."""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

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
    places = np.arange(mass.shape[1], dtype=np.float64)
    for ranks, masses in zip(ranking.numpy(), mass.to(torch.float64).numpy(), strict=True):
        # NumPy sorts an array of this size ten times faster than PyTorch, whose sorts carry indices along.
        lost = float((places * masses[_order(ranks)]).sum())
        least = float((places * np.sort(masses)[::-1]).sum())
        if least == 0:
            ratios.append(1.0 if lost == 0 else None)
        else:
            ratio = lost / least
            # No order loses less than the descending one; a ratio just below 1 is the rounding of equals.
            ratios.append(1.0 if 1.0 - ROUNDING < ratio < 1.0 else ratio)
    return ratios


def _order(ranks: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Where the ranks lie, ascending."""
    if not ranks.size:
        return ranks
    first = int(ranks.min())
    if int(ranks.max()) - first + 1 == ranks.size:  # distinct and without a gap, as all candidates' ranks are
        order = np.empty_like(ranks)
        order[ranks - first] = np.arange(ranks.size)
        return order
    return np.argsort(ranks, kind="stable")


def unprotected(event: Event) -> Tensor:
    """Which candidates of the event no protection covers, in the shape of `event.candidates`."""
    rows = event.candidates
    assert rows is not None
    return (rows >= event.sinks) & (rows < event.step - event.window)


_KNOWN = WeakIdKeyDictionary()  # ranking -> what else was asked with it, and its ratios: one for all budgets


def _ratios(event: Event, ranking: Tensor, candidates: Tensor, future_mass: Tensor) -> list[float | None]:
    """The regret of the event's ranking in every KV head."""
    shield = (event.step, event.sinks, event.window)
    known = _KNOWN.get(ranking)
    if known is not None and known[0]() is future_mass and known[1]() is candidates and known[2] == shield:
        found: list[float | None] = known[3]
        return found
    heads = len(ranking)
    rows, free = candidates.expand(heads, -1), unprotected(event).expand(heads, -1)
    found = []
    for ranks, mass, mine, loose in zip(ranking, future_mass, rows, free, strict=True):
        found += mass_regret(ranks[loose][None], mass[mine[loose]][None])
    _KNOWN[ranking] = (weakref.ref(future_mass), weakref.ref(candidates), shield, found)
    return found


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
        ratios: list[float | None] = [None] * geometry.kv_heads
        event = retained.events[0] if len(retained.events) == 1 else None
        if (
            event is not None
            and event.ranking is not None
            and event.candidates is not None
            and errors.future_mass is not None
        ):
            ratios = _ratios(event, event.ranking, event.candidates, errors.future_mass)
        per_head = torch.tensor([math.nan if r is None else r for r in ratios], dtype=torch.float64)
        return {"mass_regret": per_head.repeat_interleave(geometry.group)}
