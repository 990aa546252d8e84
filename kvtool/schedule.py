"""Schedule: when eviction runs, as one value beside policy and budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch

from kvtool.errors import KvtoolError
from kvtool.layer import Geometry
from kvtool.registry import did_you_mean
from kvtool.triggers import Clock, HighWater, Interval, PrefillBlocks, PromptEnd, Trigger, at_least

Order = Literal["before", "after"]
SPELLED = "prompt-end, at:N, every:N[,from:S], high-water:N[,from:S], prefill:N; joined by +"
MODIFIERS = "after, delay:N, block:N; each behind a /"
TRIGGERS = ("at", "every", "high-water", "prefill")  # with a number
NUMBERED = ("delay", "block")  # modifiers with a number
MOST_DIGITS = 9


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
        at_least("--delay", self.delay, 0, "steps")
        at_least("--granularity block", self.block, 1, "tokens per page")

    @property
    def repeats(self) -> bool:
        """Whether there may be several events: everything but one trigger that fires once."""
        return len(self.triggers) > 1 or not isinstance(self.triggers[0], PromptEnd)

    @property
    def counts(self) -> bool:
        """Whether it goes by how many tokens are live, not by the clock alone."""
        return any(trigger.counts for trigger in self.triggers)

    def events(self, prompt_length: int, tokens: int, live: Callable[[int], int]) -> Iterator[int]:
        """Steps before whose query an event is due, ascending, 0 < step < `tokens`. Steps at which no trigger can be
        due are passed over, so a prompt of any length costs nothing.

        Args:
            live: step -> tokens in the fullest cache that its query would see, without its own, after all events
                before it; asked only under a schedule that counts.
        """
        step, later = 0, self.order == "after"
        while step + later < tokens:
            clock = Clock(step, prompt_length, live(step) if self.counts else 0)
            coming = [found for trigger in self.triggers if (found := trigger.earliest(clock)) is not None]
            if not coming:
                return
            if min(coming) > step:
                step = min(coming)
                continue
            if step + later > 0:
                yield step + later
            step += 1

    def first_event(self, geometry: Geometry, prompt_length: int, tokens: int) -> int | None:
        """The step of the first event on a layer whose cache is untouched until then; None where none runs.

        It depends on no policy and no budget, since nothing was evicted before it.
        """

        def live(step: int) -> int:
            return step - int(geometry.first_visible(torch.tensor(step)))

        return next(self.events(prompt_length, tokens, live), None)

    def planned(self, prompt_length: int, tokens: int) -> list[int] | None:
        """The steps of all events, ascending, where they go by the clock alone; None where they do not."""
        return None if self.counts else list(self.events(prompt_length, tokens, lambda step: 0))

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
