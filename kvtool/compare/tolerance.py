"""Tolerance: how far a number may move before it counts, and what it then is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtool.errors import KvtoolError
from kvtool.registry import did_you_mean

RELATIVE, ABSOLUTE = 1e-3, 1e-9
Given = float | str | Mapping[str, float] | Iterable[str] | None


@dataclass(frozen=True)
class Tolerance:
    """|B - A| <= absolute + relative * |A|, with another of either for metrics that have their own."""

    relative: float = RELATIVE
    absolute: float = ABSOLUTE
    by_metric: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @classmethod
    def of(cls, relative: Given = None, absolute: Given = None) -> Tolerance:
        """From numbers, `NAME=number` words, or mappings; the name "" stands for all.

        Raises:
            KvtoolError: code `usage`.
        """
        given = {"relative": _numbers(relative, "--relative"), "absolute": _numbers(absolute, "--absolute")}
        by_metric: dict[str, dict[str, float]] = {}
        for kind, numbers in given.items():
            for name, number in numbers.items():
                if name:
                    by_metric.setdefault(name, {})[kind] = number
        return cls(given["relative"].get("", RELATIVE), given["absolute"].get("", ABSOLUTE), by_metric)

    def allowed(self, metric: str, a: NDArray[np.float64]) -> NDArray[np.float64]:
        """How far a number of A may move, in the shape of `a`."""
        own = self.by_metric.get(metric, {})
        found: NDArray[np.float64] = own.get("absolute", self.absolute) + own.get("relative", self.relative) * np.abs(a)
        return found

    def check(self, metrics: Iterable[str]) -> None:
        """Every name is one that is compared.

        Raises:
            KvtoolError: code `usage`.
        """
        known = list(dict.fromkeys(metrics))
        for name in self.by_metric:
            if name not in known:
                raise KvtoolError(
                    "usage", f"a tolerance names {name!r}, which is not compared", did_you_mean(name, known)
                )

    def describe(self) -> dict[str, Any]:
        by_metric = {name: dict(own) for name, own in self.by_metric.items()}
        return {"relative": self.relative, "absolute": self.absolute, "by_metric": by_metric}


def _numbers(given: Given, option: str) -> dict[str, float]:
    if given is None:
        return {}
    if isinstance(given, Mapping):
        pairs = [(str(name), number) for name, number in given.items()]
    else:
        words = [str(given)] if isinstance(given, str | int | float) else [str(word) for word in given]
        pairs = [
            (name.strip(), text) for name, _, text in (("=" + w if "=" not in w else w).rpartition("=") for w in words)
        ]
    found: dict[str, float] = {}
    for name, text in pairs:
        try:
            number = float(text)
        except (TypeError, ValueError):
            number = math.nan
        if not 0 <= number < math.inf:
            raise KvtoolError(
                "usage", f"{option} {text} is no tolerance", f"write {option} 0.01 or {option} METRIC=0.01"
            )
        found[name] = number
    return found


def verdict(difference: float, allowed: float, direction: str) -> str:
    """`within`, or past it `better`, `worse`, `moved` where no direction is better."""
    if abs(difference) <= allowed:
        return "within"
    if direction == "none":
        return "moved"
    return "better" if (difference < 0) == (direction == "lower") else "worse"
