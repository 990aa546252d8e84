"""Timing: parts of one comparison in turn, round after round, in CPU seconds of one thread.

Machines are shared and change their speed; both sides of a ratio meet the same machine when they
are timed right after each other, and the median of the rounds forgets the odd one.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from kvtool.bench.goals import Measured

Clock = Callable[[], float]

SHORTEST = 0.02  # seconds that a part runs at least: it is called again until then
ROUNDS = 3  # wanted, however long they take
MOST_ROUNDS = 31
WARM_UP = 0.2  # of the time there is: a first round shorter than this is not counted


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Torch computes on one thread inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class OutOfTime(Exception):
    """The time for the whole bench is over."""


@dataclass
class Stopwatch:
    """The clocks of one bench.

    Attributes:
        seconds: wall-clock seconds that the whole bench may take.
        cpu: CPU seconds of this process.
        wall: seconds that pass.
    """

    seconds: float
    cpu: Clock = time.process_time
    wall: Clock = time.monotonic
    begun: float = field(init=False)

    def __post_init__(self) -> None:
        self.begun = self.wall()

    @property
    def left(self) -> float:
        """Wall-clock seconds that are left."""
        return self.seconds - (self.wall() - self.begun)

    def paired(self, parts: Mapping[str, Callable[[], object]], seconds: float) -> Rounds:
        """Run the parts in turn, A B A B …, for about `seconds` of wall clock, or what is left of the whole.

        The first round warms up, and is dropped where there is time for others. A part that is over in no time is
        called several times a round.

        Raises:
            OutOfTime: there is not even time to begin.
        """
        limit = min(seconds, self.left)
        if limit <= 0:
            raise OutOfTime
        start, patience = self.wall(), min(2 * seconds, self.left)
        first = {name: self._timed(part, 1) for name, part in parts.items()}
        took = self.wall() - start
        calls = {name: max(1, min(1000, round(SHORTEST / max(once, 1e-7)))) for name, once in first.items()}
        found: dict[str, list[float]] = {name: [] for name in parts}
        if took > WARM_UP * limit:
            for name, once in first.items():
                found[name].append(once)
        done, longest = len(found[next(iter(found))]), took
        while not done or (
            done < MOST_ROUNDS and self.wall() - start + longest <= (limit if done >= ROUNDS else patience)
        ):
            begun = self.wall()
            for name, part in parts.items():
                found[name].append(self._timed(part, calls[name]))
            done, longest = done + 1, max(longest, self.wall() - begun)
        return Rounds(found)

    def _timed(self, part: Callable[[], object], calls: int) -> float:
        begun = self.cpu()
        for _ in range(calls):
            part()
        return (self.cpu() - begun) / calls


@dataclass(frozen=True)
class Rounds:
    """Seconds of every part, round by round."""

    seconds: dict[str, list[float]]

    def median(self, part: str) -> float:
        return statistics.median(self.seconds[part])

    def ratio(self, above: str, below: str, times: float = 1.0, **detail: Any) -> Measured:
        """Median, least and most of `times` · above / below over the rounds."""
        pairs = zip(self.seconds[above], self.seconds[below], strict=True)
        found = [times * a / b for a, b in pairs]
        seconds = {part: self.median(part) for part in self.seconds}
        return Measured(
            statistics.median(found), (min(found), max(found)), len(found), detail={"seconds": seconds, **detail}
        )

    def alone(self, part: str, times: float = 1.0, **detail: Any) -> Measured:
        """Median, least and most seconds of one part."""
        found = [times * seconds for seconds in self.seconds[part]]
        return Measured(statistics.median(found), (min(found), max(found)), len(found), detail=detail)
