"""Events are found without a walk over every step; the walk stands here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_random_schedules import words

from kvtool.layer import Geometry
from kvtool.schedule import Schedule, parse_schedule
from kvtool.triggers import Clock

KINDS: list[dict[str, Any]] = [{}, {"kind": "sliding", "window": 7}, {"kind": "chunked", "window": 6}]


def geometry(kind: dict[str, Any]) -> Geometry:
    return Geometry(layer=0, query_heads=1, kv_heads=1, key_dim=1, value_dim=1, scale=1.0, **kind)


def walked(schedule: Schedule, prompt: int, tokens: int, oldest: list[int], keep: int) -> tuple[list[int], list[int]]:
    """Every step asked, one after the other: the events, and the cache that the last step finds."""
    cache: list[int] = []
    events: list[int] = []
    for step in range(tokens):
        cache = [row for row in cache if row >= oldest[step]]
        if any(trigger.due(Clock(step, prompt, len(cache))) for trigger in schedule.triggers):
            event = step + (schedule.order == "after")
            if 0 < event < tokens:
                events.append(event)
                here = [*cache, step] if event > step else cache
                here = [row for row in here if row >= oldest[event]]
                left = set(here[: len(here) - keep]) if len(here) > keep else set()
                cache = [row for row in cache if row not in left]
                if step in left:
                    continue
        cache.append(step)
    return events, cache


def skipped(schedule: Schedule, prompt: int, tokens: int, oldest: list[int], keep: int) -> tuple[list[int], set[int]]:
    """The same by `Schedule.events`: what was evicted until the end beside the events; the steps asked about."""
    gone: set[int] = set()
    asked: set[int] = set()

    def live(step: int) -> int:
        asked.add(step)
        return sum(row not in gone for row in range(oldest[step], step))

    events = []
    for event in schedule.events(prompt, tokens, live):
        events.append(event)
        here = [row for row in range(oldest[event], event) if row not in gone]
        gone |= set(here[: max(len(here) - keep, 0)])
    return events, asked


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    word=words(),
    kind=st.sampled_from(KINDS),
    tokens=st.integers(1, 40),
    prompt=st.integers(0, 40),
    keep=st.integers(1, 12),
)
def test_the_same_events_as_a_walk_over_every_step(
    word: str, kind: dict[str, Any], tokens: int, prompt: int, keep: int
) -> None:
    schedule, prompt = parse_schedule(word), min(prompt, tokens)
    oldest = geometry(kind).first_visible(torch.arange(tokens)).tolist()
    found, asked = skipped(schedule, prompt, tokens, oldest, keep)
    assert found == walked(schedule, prompt, tokens, oldest, keep)[0]
    assert schedule.counts or not asked, "a schedule that goes by the clock asks for no cache"


@settings(max_examples=200, deadline=None, derandomize=True)
@given(word=words(), kind=st.sampled_from(KINDS), tokens=st.integers(1, 40), prompt=st.integers(0, 40))
def test_first_and_planned_events(word: str, kind: dict[str, Any], tokens: int, prompt: int) -> None:
    schedule, prompt, layer = parse_schedule(word), min(prompt, tokens), geometry(kind)
    oldest = layer.first_visible(torch.arange(tokens)).tolist()
    whole = walked(schedule, prompt, tokens, oldest, tokens)[0]  # nothing ever leaves
    assert schedule.first_event(layer, prompt, tokens) == (whole[0] if whole else None)
    assert schedule.planned(prompt, tokens) == (None if schedule.counts else whole)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(word=words(), step=st.integers(0, 60), prompt=st.integers(0, 40), live=st.integers(0, 60))
def test_a_trigger_passes_over_no_step_at_which_it_is_due(word: str, step: int, prompt: int, live: int) -> None:
    for trigger in parse_schedule(word).triggers:
        found = trigger.earliest(Clock(step, prompt, live))
        growing = [later for later in range(step, step + 130) if trigger.due(Clock(later, prompt, live + later - step))]
        assert found is None or found >= step
        if found is not None and found < step + 130:
            assert growing[0] == found
        else:
            assert growing == []
        assert (found == step) == trigger.due(Clock(step, prompt, live))


@pytest.mark.parametrize("word", ["prompt-end", "every:64", "prefill:4096", "high-water:999000", "at:999999"])
def test_long_sequences_are_not_walked(word: str) -> None:
    asked: list[int] = []

    def live(step: int) -> int:
        asked.append(step)
        return step

    events = list(parse_schedule(word).events(10**6 - 64, 10**6, live))
    assert events
    if word.startswith("high-water"):  # nothing is evicted here, so every step from the mark on is due
        assert len(asked) <= len(events) + 2
    else:
        assert not asked
        assert len(events) < 300
