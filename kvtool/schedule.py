"""Schedule: when eviction runs, as one value beside policy and budget."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch

from kvtool.errors import KvtoolError
from kvtool.layer import Geometry
from kvtool.registry import did_you_mean

Order = Literal["before", "after"]
SPELLED = "prompt-end, at:N, every:N[,from:S], high-water:N[,from:S], prefill:N; joined by +"
MODIFIERS = "after, delay:N, block:N; each behind a /"
TRIGGERS = ("at", "every", "high-water", "prefill")  # with a number
NUMBERED = ("delay", "block")  # modifiers with a number
MOST_DIGITS = 9


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
    """Says at which steps an event runs. Its text is what a user types."""

    def due(self, clock: Clock) -> bool: ...


@dataclass(frozen=True)
class PromptEnd:
    """Once, at query `prompt_length`, or at query `at`."""

    at: int | None = None

    def __post_init__(self) -> None:
        if self.at is not None and self.at < 1:
            raise KvtoolError("usage", f"an event at step {self.at} has no token to evict", "--evict-at is at least 1")

    def due(self, clock: Clock) -> bool:
        return clock.step == (clock.prompt_length if self.at is None else self.at)

    def __str__(self) -> str:
        return "prompt-end" if self.at is None else f"at:{self.at}"


@dataclass(frozen=True)
class Interval:
    """Every `every` steps: at `start + k·every`, k >= 0; `start` is the prompt's end unless given."""

    every: int
    start: int | None = None

    def __post_init__(self) -> None:
        _at_least("--every", self.every, 1, "steps between events")
        _at_least("--from", self.start, 0, "a step")

    def due(self, clock: Clock) -> bool:
        since = clock.step - (clock.prompt_length if self.start is None else self.start)
        return since >= 0 and since % self.every == 0

    def __str__(self) -> str:
        return f"every:{self.every}" + ("" if self.start is None else f",from:{self.start}")


@dataclass(frozen=True)
class HighWater:
    """Whenever the query would see more than `mark` tokens, its own included: no query ever does (order before).

    The budget is the low-water mark that eviction goes down to.
    """

    mark: int
    start: int | None = None

    def __post_init__(self) -> None:
        _at_least("--high-water", self.mark, 2, "tokens per KV head")
        _at_least("--from", self.start, 0, "a step")

    def due(self, clock: Clock) -> bool:
        start = clock.prompt_length if self.start is None else self.start
        return clock.step >= start and clock.live + 1 > self.mark

    def __str__(self) -> str:
        return f"high-water:{self.mark}" + ("" if self.start is None else f",from:{self.start}")


@dataclass(frozen=True)
class PrefillBlocks:
    """Inside the prompt, after every block of `size` tokens and at its end: the cache never holds more than the
    budget and a block (KeyDiff, 2504.15364)."""

    size: int

    def __post_init__(self) -> None:
        _at_least("--prefill-block", self.size, 1, "tokens")

    def due(self, clock: Clock) -> bool:
        inside = 0 < clock.step < clock.prompt_length and clock.step % self.size == 0
        return inside or clock.step == clock.prompt_length

    def __str__(self) -> str:
        return f"prefill:{self.size}"


@dataclass(frozen=True)
class Schedule:
    """When eviction runs, and on what.

    Attributes:
        triggers: an event runs where any of them is due.
        order: `before`, the event runs before the attention of the query that is due; `after`, behind it, which is
            the same as before the next query's.
        delay: a token is judged only when it left the protected window that many steps ago.
        block: tokens per page; above 1 whole pages leave, the same in all heads of a layer.
    """

    triggers: tuple[Trigger, ...] = (PromptEnd(),)
    order: Order = "before"
    delay: int = 0
    block: int = 1

    def __post_init__(self) -> None:
        if not self.triggers:
            raise KvtoolError("usage", "a schedule without a trigger never runs", SPELLED)
        if self.order not in ("before", "after"):
            raise KvtoolError("usage", f"--evict-order {self.order} is unknown", "known: before, after")
        _at_least("--delay", self.delay, 0, "steps")
        _at_least("--granularity block", self.block, 1, "tokens per page")

    @property
    def repeats(self) -> bool:
        """Whether there may be several events: everything but one trigger that fires once."""
        return len(self.triggers) > 1 or not isinstance(self.triggers[0], PromptEnd)

    def event(self, clock: Clock) -> int | None:
        """The step before whose query the event runs that is due at this query, or None."""
        if not any(trigger.due(clock) for trigger in self.triggers):
            return None
        return clock.step + (self.order == "after")

    def first_event(self, geometry: Geometry, prompt_length: int, tokens: int) -> int | None:
        """The step of the first event on a layer whose cache is untouched until then; None where none runs.

        It depends on no policy and no budget, since nothing was evicted before it.
        """
        first = geometry.first_visible(torch.arange(tokens)).tolist()
        for step in range(tokens):
            event = self.event(Clock(step, prompt_length, step - first[step]))
            if event is not None and 0 < event < tokens:
                return event
        return None

    def planned(self, prompt_length: int, tokens: int) -> list[int] | None:
        """The steps of all events, ascending, where they go by the clock alone; None where they do not."""
        if any(isinstance(trigger, HighWater) for trigger in self.triggers):
            return None
        found = (self.event(Clock(step, prompt_length, 0)) for step in range(tokens))
        return [event for event in found if event is not None and 0 < event < tokens]

    def check(self, prompt_length: int, tokens: int) -> None:
        """Refuse a single event that has nothing to evict, or no query after it.

        Raises:
            KvtoolError: code `no-queries`.
        """
        if self.repeats:
            return
        (trigger,) = self.triggers
        assert isinstance(trigger, PromptEnd)
        step = (prompt_length if trigger.at is None else trigger.at) + (self.order == "after")
        if step >= tokens:
            raise KvtoolError(
                "no-queries",
                f"the event at step {step} has no query after it: the sequence has {tokens} tokens",
                "choose an earlier --evict-at, or capture with --max-new-tokens or --eval-tokens",
            )

    def __str__(self) -> str:
        parts = ["+".join(str(trigger) for trigger in self.triggers)]
        if self.order == "after":
            parts.append("after")
        if self.delay:
            parts.append(f"delay:{self.delay}")
        if self.block > 1:
            parts.append(f"block:{self.block}")
        return "/".join(parts)


def parse_schedule(text: str) -> Schedule:
    """The schedule that `str` spelled.

    Raises:
        KvtoolError: code `usage`, naming the word that is not understood and the nearest one that is.
    """
    head, *modifiers = (part.strip() for part in text.split("/"))
    schedule = Schedule(tuple(_trigger(word.strip(), text) for word in head.split("+")))
    said: set[str] = set()
    for word in modifiers:
        name, colon, number = word.partition(":")
        if name not in NUMBERED and (colon or name != "after"):
            raise _unknown(text, word, name, ["after", *NUMBERED], MODIFIERS)
        if name in said:
            raise KvtoolError("usage", f"schedule {text!r} says {name} twice", MODIFIERS)
        said.add(name)
        if name == "after":
            schedule = replace(schedule, order="after")
        elif name == "delay":
            schedule = replace(schedule, delay=_whole(name, number, text))
        else:
            schedule = replace(schedule, block=_whole(name, number, text))
    return schedule


def _trigger(word: str, text: str) -> Trigger:
    name, *more = (field.strip().partition(":") for field in word.split(","))
    if name[0] == "prompt-end":
        if name[1] or more:
            raise KvtoolError("usage", f"schedule {text!r}: prompt-end takes no number", SPELLED)
        return PromptEnd()
    if name[0] not in TRIGGERS:
        raise _unknown(text, word, name[0], ["prompt-end", *TRIGGERS], SPELLED)
    number = _whole(name[0], name[2], text)
    if name[0] == "at":
        trigger: Trigger = PromptEnd(number)
    elif name[0] == "prefill":
        trigger = PrefillBlocks(number)
    else:
        start = _whole("from", more.pop(0)[2], text) if more and more[0][0] == "from" else None
        trigger = Interval(number, start) if name[0] == "every" else HighWater(number, start)
    if more:
        raise _unknown(text, word, more[0][0], ["from"], SPELLED)
    return trigger


def _unknown(text: str, word: str, name: str, known: list[str], spelled: str) -> KvtoolError:
    nearest = did_you_mean(name, known).partition("known: ")[0]
    return KvtoolError("usage", f"schedule {text!r}: {word!r} is not understood", f"{nearest}known: {spelled}")


def _whole(name: str, number: str, text: str) -> int:
    digits = number.removeprefix("-")
    if not digits.isascii() or not digits.isdigit():
        raise KvtoolError(
            "usage", f"schedule {text!r}: {name} takes a whole number, not {number!r}", f"such as {name}:8"
        )
    if len(digits) > MOST_DIGITS:
        raise KvtoolError("usage", f"schedule {text!r}: {number} has more than {MOST_DIGITS} digits")
    return int(number)


def _at_least(option: str, value: int | None, least: int, noun: str) -> None:
    if value is not None and value < least:
        raise KvtoolError("usage", f"{option} {value} is too small", f"{noun}: at least {least}")
