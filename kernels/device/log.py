"""Log: which version of every operation ran, how often, and why it was not Triton's."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

Counts = dict[str, dict[str, Any]]  # op -> {"triton": n, "cpu": n, "reasons": {reason: n}}


@dataclass
class Log:
    """Counts of one unit of work.

    Attributes:
        counts: per operation how many calls ran in Triton and how many on the CPU, with reasons. A head that a
            Triton call hands to the CPU is counted in `reasons` alone: the call is Triton's.
    """

    counts: Counts = field(default_factory=dict)

    def ran(self, op: str, reason: str | None = None) -> None:
        """One call: Triton's, or the CPU's for a reason."""
        mine = self._of(op)
        mine["triton" if reason is None else "cpu"] += 1
        if reason is not None:
            self.because(op, reason)

    def because(self, op: str, reason: str) -> None:
        """The CPU did something for `reason`."""
        reasons = self._of(op)["reasons"]
        reasons[reason] = reasons.get(reason, 0) + 1

    def _of(self, op: str) -> dict[str, Any]:
        return self.counts.setdefault(op, {"triton": 0, "cpu": 0, "reasons": {}})


def merged(parts: Iterable[Counts]) -> Counts:
    """The counts of several units together, operations and reasons in alphabetical order."""
    total = Log()
    for part in parts:
        for op, counts in part.items():
            mine = total._of(op)
            mine["triton"] += counts["triton"]
            mine["cpu"] += counts["cpu"]
            for reason, times in counts["reasons"].items():
                mine["reasons"][reason] = mine["reasons"].get(reason, 0) + times
    return {
        op: {**counts, "reasons": dict(sorted(counts["reasons"].items()))}
        for op, counts in sorted(total.counts.items())
    }


def summary(counts: Counts) -> str:
    """One sentence: what ran where, and why not on the card."""
    said = []
    for op, mine in counts.items():
        because = "; ".join(f"{reason} ({times})" for reason, times in mine["reasons"].items())
        said.append(f"{op} {mine['triton']} in Triton, {mine['cpu']} on the CPU" + (f": {because}" if because else ""))
    return "; ".join(said) if said else "no operation was called"
