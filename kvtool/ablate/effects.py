"""Effects: what each change does on its own and in company, with intervals over what was paired."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kvtool.ablate.design import Change, Design, Variant
from kvtool.metrics.student_t import two_sided

Unit = Literal["sequences", "layers"]
Numbers = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Values:
    """One metric of one variant.

    Attributes:
        sequences: [S] float64, one number a sequence.
        layers: [S, L] float64, one a layer, scaled so that their mean over L is the sequence's number; NaN where
            a sequence lacks the layer or it is undefined there.
    """

    sequences: Numbers
    layers: Numbers

    @property
    def mean(self) -> float:
        return float(self.sequences.mean())

    def of(self, unit: Unit) -> Numbers:
        """[n], the numbers that are paired: a sequence's, or with one sequence a layer's."""
        if unit == "sequences":
            return self.sequences
        known: Numbers = self.layers[0][~np.isnan(self.layers[0])]
        return known


Measured = Mapping[tuple[str, str | None], Values]  # by Variant.point


def unit_of(measured: Measured) -> Unit:
    """Sequences are independent of each other, layers are not: these serve only where there is one sequence."""
    return "sequences" if len(next(iter(measured.values())).sequences) > 1 else "layers"


def interval(differences: Numbers) -> tuple[float | None, float | None]:
    """95 % by Student's t over paired differences [n]; None below two."""
    count = len(differences)
    if count < 2:
        return None, None
    middle = float(differences.mean())
    half = two_sided(count - 1) * float(differences.std(ddof=1)) / math.sqrt(count)
    return middle - half, middle + half


def main_effects(design: Design, measured: Measured) -> list[dict[str, Any]]:
    """One entry per level, largest change first: the mean over every context that was tried without and with it."""
    unit = unit_of(measured)
    found = []
    for change in design.singles:
        contexts = design.contexts(change)
        found.append(
            {
                "kind": "level",
                "axis": change.axis,
                "level": change.level,
                "instead_of": design.own[change.axis],
                "policy": contexts[0][1].label,
                **_over_contexts(change, contexts, measured, unit),
                "with_companion": _with_companion(design, change, measured),
            }
        )
    return ranked(found, "effect")


def _with_companion(design: Design, change: Change, measured: Measured) -> float | None:
    """The change beside the companion's; None where they were not tried together."""
    companion = design.companion
    for a, b in design.pairs:
        if companion is not None and companion != change and {a, b} == {companion, change}:
            return measured[design.variants[(a, b)].point].mean - measured[design.variants[(companion,)].point].mean
    return None


def steps(path: list[tuple[str, Variant]], measured: Measured) -> list[dict[str, Any]]:
    """One entry per step of a path from one policy to another, in its order: (what changed, the policy then)."""
    unit = unit_of(measured)
    return [
        {
            "kind": "step",
            "axis": "path",
            "level": said,
            "instead_of": before.label,
            "policy": after.label,
            **_over_contexts(None, [(before, after)], measured, unit),
            "rank": None,
        }
        for (_, before), (said, after) in itertools.pairwise(path)
    ]


def _over_contexts(
    change: Change | None, contexts: list[tuple[Variant, Variant]], measured: Measured, unit: Unit
) -> dict[str, Any]:
    def difference(pick: Callable[[Values], Numbers]) -> Numbers:
        """[contexts, ...] with minus without."""
        return np.stack([pick(measured[b.point]) - pick(measured[a.point]) for a, b in contexts])

    paired = difference(lambda values: values.of(unit)).mean(0)
    alone = [measured[b.point].mean - measured[a.point].mean for a, b in contexts]
    logs = [_log_ratio(measured[a.point].mean, measured[b.point].mean) for a, b in contexts]
    low, high = interval(paired)
    layers = _over_layers(difference(lambda values: values.layers).mean(0))
    effect = math.fsum(alone) / len(alone)
    least, most = int(np.argmin(alone)), int(np.argmax(alone))
    known = [value for value in logs if value is not None]
    return {
        "effect": effect,
        "low": low,
        "high": high,
        "paired_over": unit,
        "pairs": len(paired),
        "without": measured[contexts[0][0].point].mean,
        "with": measured[contexts[0][1].point].mean,
        "at_reference": alone[0],
        "factor": math.exp(math.fsum(known) / len(known)) if len(known) == len(logs) else None,
        "contexts": len(contexts),
        "lowest": alone[least],
        "lowest_with": _company(change, contexts[least][0]),
        "highest": alone[most],
        "highest_with": _company(change, contexts[most][0]),
        "layers_agreeing": int((np.sign(layers) == np.sign(effect)).sum()) if effect else None,
        "layers": len(layers),
    }


def interaction_entries(design: Design, measured: Measured) -> list[dict[str, Any]]:
    """One entry per pair that was tried, largest first: the second difference y_ab - y_a - y_b + y_0.

    0 means that both changes add up. Negative: together they give less error than their sum.
    """
    unit = unit_of(measured)
    zero = measured[design.reference.point]
    found = []
    for a, b in design.pairs:
        only_a, only_b, both = (measured[design.variants[c].point] for c in ((a,), (b,), (a, b)))
        paired = both.of(unit) - only_a.of(unit) - only_b.of(unit) + zero.of(unit)
        low, high = interval(paired)
        found.append(
            {
                "axis_a": a.axis,
                "level_a": a.level,
                "axis_b": b.axis,
                "level_b": b.level,
                "policy": design.variants[(a, b)].label,
                "interaction": both.mean - only_a.mean - only_b.mean + zero.mean,
                "low": low,
                "high": high,
                "paired_over": unit,
                "pairs": len(paired),
                "a_alone": only_a.mean - zero.mean,
                "a_with_b": both.mean - only_b.mean,
                "b_alone": only_b.mean - zero.mean,
                "b_with_a": both.mean - only_a.mean,
                "together": both.mean,
            }
        )
    return ranked(found, "interaction")


def ranked(entries: list[dict[str, Any]], column: str) -> list[dict[str, Any]]:
    """Entries by the size of `column`, the first of equals first, each with its `rank` from 1."""
    ordered = sorted(entries, key=lambda entry: -abs(entry[column]))
    return [{**entry, "rank": rank} for rank, entry in enumerate(ordered, start=1)]


def _over_layers(differences: Numbers) -> Numbers:
    """[S, L] -> the mean over sequences of each layer that is known in some."""
    known = ~np.isnan(differences)
    counts = known.sum(0)
    means: Numbers = np.where(known, differences, 0.0).sum(0)[counts > 0] / counts[counts > 0]
    return means


def _log_ratio(without: float, with_: float) -> float | None:
    """log(with / without); None where one of them is not above 0."""
    return math.log(with_ / without) if without > 0 and with_ > 0 else None


def _company(change: Change | None, without: Variant) -> str | None:
    """What a context has besides; None at the reference."""
    return " ".join(other.level for other in without.changes if other != change) or None
