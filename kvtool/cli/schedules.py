"""The options that say when eviction runs, the same for every command that evicts."""

from __future__ import annotations

from typing import Annotated

import typer

EvictAt = Annotated[int | None, typer.Option(help="Step of a single event. Default: the end of the prompt.")]
Every = Annotated[int | None, typer.Option(help="An event every N steps, the first at the end of the prompt.")]
From = Annotated[
    int | None, typer.Option("--from", help="Where --every or --high-water starts, e.g. 0 for the prompt.")
]
HighWater = Annotated[
    int | None, typer.Option(help="An event whenever a query would see more than N tokens; -b is the low-water mark.")
]
PrefillBlock = Annotated[
    int | None, typer.Option(help="Events in the prompt, after every N tokens and at its end; joins --every.")
]
PromptEnd = Annotated[bool, typer.Option("--prompt-end", help="An event at the end of the prompt; joins the others.")]
EvictOrder = Annotated[str, typer.Option(help="before or after the attention of the step that an event is due at.")]
Delay = Annotated[int, typer.Option(help="Judge a token only when it left the protected window that many steps ago.")]
Granularity = Annotated[
    str, typer.Option(help="token, or block:N: whole pages of N tokens leave, the same in all heads of a layer.")
]
Spelled = Annotated[
    list[str] | None,
    typer.Option("-s", "--schedule", help="A schedule in one word, e.g. every:64,from:0/after; repeatable, compared."),
]
Prefix = Annotated[int, typer.Option(help="First tokens, such as a system prompt, that no policy may evict.")]
Deadline = Annotated[
    float | None,
    typer.Option("--deadline-ms", help="An event that takes longer keeps the sliding window. Not reproducible."),
]


def schedule_words(
    *,
    evict_at: int | None,
    every: int | None,
    start: int | None,
    high_water: int | None,
    prefill_block: int | None,
    prompt_end: bool,
    evict_order: str,
    delay: int,
    granularity: str,
    spelled: list[str] | None,
) -> list[str]:
    """The schedules that the options spell, in the words of kvtool.schedule.parse_schedule.

    Raises:
        KvtoolError: code `usage` for options that contradict each other.
    """
    from kvtool.errors import KvtoolError
    from kvtool.schedule import parse_schedule

    triggers = []
    if evict_at is not None:
        triggers.append(f"at:{evict_at}")
    if prompt_end:
        triggers.append("prompt-end")
    if prefill_block is not None:
        triggers.append(f"prefill:{prefill_block}")
    if start is not None and every is None and high_water is None:
        raise KvtoolError("usage", "--from says where --every or --high-water starts, and neither was given")
    for name, number in (("every", every), ("high-water", high_water)):
        if number is not None:
            triggers.append(f"{name}:{number}" + ("" if start is None else f",from:{start}"))
    kind, _, size = granularity.partition(":")
    if kind not in ("token", "block") or (kind == "token" and size) or (kind == "block" and not size):
        raise KvtoolError("usage", f"--granularity {granularity} is unknown", "known: token, block:N such as block:16")
    modifiers = []
    if evict_order != "before":
        if evict_order != "after":
            raise KvtoolError("usage", f"--evict-order {evict_order} is unknown", "known: before, after")
        modifiers.append("after")
    if delay:
        modifiers.append(f"delay:{delay}")
    if kind == "block":
        modifiers.append(f"block:{size}")
    if spelled and (triggers or modifiers):
        raise KvtoolError("usage", "--schedule stands for itself: leave the other schedule options out")
    if spelled:
        return spelled
    word = "/".join(["+".join(triggers) or "prompt-end", *modifiers])
    return [str(parse_schedule(word))]
