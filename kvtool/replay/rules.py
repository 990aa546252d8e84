"""Rules: what every policy of a run has in common when its cache is moved through a sequence."""

from __future__ import annotations

from dataclasses import dataclass

from kvtool.policies import Protection
from kvtool.schedule import Schedule


@dataclass(frozen=True)
class Rules:
    """What every policy of a run has in common.

    Attributes:
        protection: sinks and window that no policy may evict.
        deadline_ms: an event that takes longer keeps the sliding window instead; None is no deadline.
        telemetry: measure how long the stages take, and the bytes that they need.
    """

    schedule: Schedule
    protection: Protection
    deadline_ms: float | None = None
    telemetry: bool = False

    @property
    def timed(self) -> bool:
        """Whether it matters how long a policy takes."""
        return self.telemetry or self.deadline_ms is not None
