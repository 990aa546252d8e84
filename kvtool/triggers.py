"""Triggers: at which steps an event runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

from kvtool.errors import KvtoolError


@dataclass(frozen=True)
class Clock:
    """What a trigger may know just before a query runs.

    Attributes:
        step: the row of the query.
        prompt_length: rows of the prompt.
        live: tokens in the fullest cache of a KV head that the query would see, without its own.
    """

    step: int
    prompt_length: int
    live: int


class Trigger(Protocol):
    """Says at which steps an event runs. Its text is what a user types.

    Attributes:
        counts: whether it goes by how many tokens are live, not by the clock alone.
    """

    @property
    def counts(self) -> bool: ...

    def due(self, clock: Clock) -> bool: ...

    def earliest(self, clock: Clock) -> int | None:
        """The first step from `clock.step` on at which it can be due while nothing is evicted, so that a cache grows
        by a token a step at most; that very step where it is due, None where it never is again."""


@dataclass(frozen=True)
class PromptEnd:
    """Once, at query `prompt_length`, or at query `at`."""

    at: int | None = None

    counts: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.at is not None and self.at < 1:
            raise KvtoolError("usage", f"an event at step {self.at} has no token to evict", "--evict-at is at least 1")

    def due(self, clock: Clock) -> bool:
        return clock.step == (clock.prompt_length if self.at is None else self.at)

    def earliest(self, clock: Clock) -> int | None:
        step = clock.prompt_length if self.at is None else self.at
        return step if step >= clock.step else None

    def __str__(self) -> str:
        return "prompt-end" if self.at is None else f"at:{self.at}"


@dataclass(frozen=True)
class Interval:
    """Every `every` steps: at `start + k·every`, k >= 0; `start` is the prompt's end unless given."""

    every: int
    start: int | None = None

    counts: ClassVar[bool] = False

    def __post_init__(self) -> None:
        at_least("--every", self.every, 1, "steps between events")
        at_least("--from", self.start, 0, "a step")

    def due(self, clock: Clock) -> bool:
        since = clock.step - (clock.prompt_length if self.start is None else self.start)
        return since >= 0 and since % self.every == 0

    def earliest(self, clock: Clock) -> int | None:
        start = clock.prompt_length if self.start is None else self.start
        return clock.step + (start - clock.step) % self.every if clock.step > start else start

    def __str__(self) -> str:
        return f"every:{self.every}" + ("" if self.start is None else f",from:{self.start}")


@dataclass(frozen=True)
class HighWater:
    """Whenever the query would see more than `mark` tokens, its own included: no query ever does (order before).

    The budget is the low-water mark that eviction goes down to.
    """

    mark: int
    start: int | None = None

    counts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        at_least("--high-water", self.mark, 2, "tokens per KV head")
        at_least("--from", self.start, 0, "a step")

    def due(self, clock: Clock) -> bool:
        start = clock.prompt_length if self.start is None else self.start
        return clock.step >= start and clock.live + 1 > self.mark

    def earliest(self, clock: Clock) -> int | None:
        start = clock.prompt_length if self.start is None else self.start
        return max(start, clock.step + max(self.mark - clock.live, 0))

    def __str__(self) -> str:
        return f"high-water:{self.mark}" + ("" if self.start is None else f",from:{self.start}")


@dataclass(frozen=True)
class PrefillBlocks:
    """Inside the prompt, after every block of `size` tokens and at its end: the cache never holds more than the
    budget and a block (KeyDiff, 2504.15364)."""

    size: int

    counts: ClassVar[bool] = False

    def __post_init__(self) -> None:
        at_least("--prefill-block", self.size, 1, "tokens")

    def due(self, clock: Clock) -> bool:
        inside = 0 < clock.step < clock.prompt_length and clock.step % self.size == 0
        return inside or clock.step == clock.prompt_length

    def earliest(self, clock: Clock) -> int | None:
        if clock.step > clock.prompt_length:
            return None
        block_end = -(-max(clock.step, 1) // self.size) * self.size
        return min(block_end, clock.prompt_length)

    def __str__(self) -> str:
        return f"prefill:{self.size}"


def at_least(option: str, value: int | None, least: int, noun: str) -> None:
    """Refuse a `value` below `least`.

    Raises:
        KvtoolError: code `usage`.
    """
    if value is not None and value < least:
        raise KvtoolError("usage", f"{option} {value} is too small", f"{noun}: at least {least}")
