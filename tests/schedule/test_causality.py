"""The loop reads nothing at or behind an event, and nothing of what has left: whatever lies there, no bit changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from formulas import POLICIES
from layers import LAYERS, make
from torch import Tensor

from kvtool.budget import Budget
from kvtool.kernels.retained_attention.reference import retained_attention
from kvtool.layer import Geometry, Layer
from kvtool.policies import Policy, Protection, policy_from_text
from kvtool.replay.decide import run_schedule
from kvtool.replay.rules import Rules
from kvtool.retained import Event, RetainedSet
from kvtool.schedule import parse_schedule
from kvtool.triggers import Clock, Trigger
from kvtool.view import View

SCHEDULES = (
    "at:12",
    "every:3,from:4",
    "every:1,from:0",
    "high-water:6,from:0/after",
    "prefill:4+every:2/delay:1",
    "every:2/block:3",
)
CAUSAL = [text for text in POLICIES if not policy_from_text(text)[1].oracle]
make_once = cache(make)


@dataclass(frozen=True)
class Until:
    """A trigger that falls silent behind `last`."""

    trigger: Trigger
    last: int

    @property
    def counts(self) -> bool:
        return self.trigger.counts

    def due(self, clock: Clock) -> bool:
        return clock.step <= self.last and self.trigger.due(clock)

    def earliest(self, clock: Clock) -> int | None:
        found = self.trigger.earliest(clock)
        return found if found is not None and found <= self.last else None


def run(layer: Layer, policy: Policy, word: str, last: int | None = None) -> RetainedSet:
    """All events, or those before the queries up to `last`."""
    schedule = parse_schedule(word)
    if last is not None:
        silent = last - (schedule.order == "after")
        schedule = replace(schedule, triggers=tuple(Until(trigger, silent) for trigger in schedule.triggers))
    return run_schedule(layer, "p", policy, [Budget.from_tokens(5)], Rules(schedule, Protection(1, 1)))[0]


def changed(layer: Layer, since: int, change: Callable[[Tensor], Tensor]) -> Layer:
    """The layer with other queries, keys and values from row `since` on."""

    def loader(name: str) -> Callable[[], Tensor]:
        array = layer.loaders[name]()
        array = torch.cat([array[:, :since], change(array[:, since:])], dim=1)
        return lambda: array

    return replace(layer, loaders={**layer.loaders, **{name: loader(name) for name in ("queries", "keys", "values")}})


def bits(event: Event) -> tuple[Any, ...]:
    return event.step, event.achieved.tolist(), event.ties.tolist(), repr(event.margin.tolist()), event.overfull


def expect_same_until(found: RetainedSet, whole: RetainedSet, last: int, what: str) -> None:
    both = found.evict_step, whole.evict_step
    assert torch.equal(*(torch.where(one <= last, one, last + 1) for one in both)), f"{what} from row {last} on"
    before = [[bits(event) for event in one.events if event.step <= last] for one in (found, whole)]
    assert before[0] == before[1], f"{what} from row {last} on"


@pytest.mark.parametrize("word", SCHEDULES)
@pytest.mark.parametrize("text", CAUSAL)
def test_no_decision_sees_the_future(text: str, word: str) -> None:
    """Rows from t on are replaced; what was decided up to t stays, at every event and between events."""
    turn = CAUSAL.index(text) + SCHEDULES.index(word)
    layer, policy = make_once(list(LAYERS)[turn % len(LAYERS)], 18), policy_from_text(text)[1]
    whole = run(layer, policy, word)
    events = [event.step for event in whole.events]
    assert events
    between = [t for t in range(1, layer.tokens) if t not in events]
    for t in [*events, *between[turn % 7 :: 7]]:
        other = changed(layer, t, lambda x: 3 * x.flip(1) - 1)
        expect_same_until(run(other, policy, word), whole, t, "other numbers")
        expect_same_until(run(changed(layer, t, lambda x: x * torch.nan), policy, word, t), whole, t, "NaN")


def test_the_check_would_notice() -> None:
    """An oracle's decisions do change, so the comparison above can fail."""
    layer, policy = make_once("full", 22), policy_from_text("oracle-mass")[1]
    other = run(changed(layer, 12, lambda x: 3 * x.flip(1) - 1), policy, "at:12")
    with pytest.raises(AssertionError, match="other numbers"):
        expect_same_until(other, run(layer, policy, "at:12"), 12, "other numbers")


@dataclass(frozen=True)
class Blind(Policy):
    """The inner policy on a layer where every slot that the view does not offer holds `filler`: what was evicted,
    what the window left behind, what is yet to come."""

    inner: Policy = Policy()  # noqa: RUF009 (a frozen value)
    filler: float = 0.0

    @property
    def nested(self) -> bool:  # type: ignore[override]
        return self.inner.nested

    def protection(self, budget: int) -> Protection:
        return self.inner.protection(budget)

    def start(self, geometry: Geometry) -> Any:
        return self.inner.start(geometry)

    def observe(self, state: Any, view: View) -> Any:
        return self.inner.observe(state, self._blinded(view))

    def score(self, state: Any, view: View) -> Tensor:
        return self.inner.score(state, self._blinded(view))

    def diagnose(self, state: Any, view: View) -> dict[str, Tensor]:
        return self.inner.diagnose(state, self._blinded(view))

    def _blinded(self, view: View) -> View:
        layer = view._layer
        offered = torch.zeros(layer.geometry.kv_heads, layer.tokens, dtype=torch.bool)
        offered.scatter_(1, view.tokens, view.evict_step > view.start)  # what fills up a short head is not offered

        def loader(name: str) -> Callable[[], Tensor]:
            array = getattr(layer, name).masked_fill(~offered[..., None], self.filler)
            return lambda: array

        return replace(
            view, _layer=replace(layer, loaders={**layer.loaders, **{n: loader(n) for n in ("keys", "values")}})
        )


@pytest.mark.parametrize("filler", [float("nan"), 1e30])
@pytest.mark.parametrize("text", CAUSAL)
def test_what_has_left_cannot_come_back(text: str, filler: float) -> None:
    policy, evicted = policy_from_text(text)[1], 0
    for turn, word in enumerate(SCHEDULES):
        layer = make_once(list(LAYERS)[(turn + CAUSAL.index(text)) % len(LAYERS)], 22)
        seeing, blind = run(layer, policy, word), run(layer, Blind(policy, filler), word)
        assert seeing.digest() == blind.digest(), word
        assert [bits(event) for event in seeing.events] == [bits(event) for event in blind.events], word
        evicted += int((seeing.evict_step < layer.tokens).sum())
    assert evicted > 50


@pytest.mark.parametrize("filler", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("name", LAYERS)
def test_retained_outputs_do_not_see_evicted_slots(name: str, filler: float) -> None:
    """After the last event of several, outputs over what is left are the same bits whatever the empty slots hold."""
    layer = make_once(name, 22)
    retained = run(layer, policy_from_text("h2o")[1], "every:2,from:3")
    last = int(retained.evict_step[retained.evict_step < layer.tokens].max())
    gone = (retained.evict_step < layer.tokens)[..., None]
    assert bool(gone.any())
    outputs = []
    for nothing in (torch.zeros_like(gone), gone):
        steps, geometry = torch.arange(last, layer.tokens), layer.geometry
        blocks = retained_attention(
            layer.queries[:, last:],
            layer.keys.masked_fill(nothing, filler),
            layer.values.masked_fill(nothing, filler),
            retained.evict_step[None],
            steps=steps,
            rows=torch.arange(layer.tokens),
            first_visible=geometry.first_visible(steps),
            scale=geometry.scale,
            softcap=geometry.softcap,
            sink_logits=geometry.sink_logits,
        )
        outputs.append(torch.cat([block.retained for block in blocks], dim=1))
    assert torch.equal(*outputs)
