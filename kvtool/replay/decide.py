"""Decide: from a policy's scores to retained sets, event after event.

A `Track` is the cache of one layer under one policy and budget, moved through the sequence by a schedule: append, and
where an event is due protect, score the rest, fill the budget, go on. At step t it has read nothing at or behind t.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from collections.abc import Sequence as Many
from typing import Any

import torch
from torch import Tensor

from kvtool.allocator import Allocator, Uniform
from kvtool.budget import Budget
from kvtool.layer import Layer
from kvtool.policies import Policy, Protection
from kvtool.replay.ask import built_in, observed, protection_of, sheltering, started
from kvtool.replay.choose import Answer, Choice, First, Scored, choose, newest, score_caches, untouched
from kvtool.replay.rows import filled, oldest_rows
from kvtool.replay.rules import Rules
from kvtool.replay.telemetry import TensorBytes, compact
from kvtool.retained import Event, RetainedSet
from kvtool.schedule import Schedule
from kvtool.stopwatch import stage, watching
from kvtool.trace import Sequence
from kvtool.triggers import PromptEnd
from kvtool.view import View


def donor_of(sequence: Sequence, layer: Layer) -> Layer:
    """The layer whose cache `layer` reads: its own, or its donor's."""
    source = layer.geometry.kv_source
    return layer if source is None else sequence.layer(source, dtype=layer.dtype)


def decide(
    layer: Layer,
    label: str,
    policy: Policy,
    budgets: Many[Budget],
    step: int,
    protection: Protection,
    steps_ahead: Tensor,
    allocator: Allocator | None = None,
) -> list[RetainedSet]:
    """Run one event before query `step` on an untouched cache.

    Args:
        layer: whose keys, values and earlier queries are scored.
        steps_ahead: [F] int64 evaluated steps, shown to oracles only.

    Returns:
        One retained set per budget, in order. Tokens outside the layer's window stay untouched.

    Raises:
        KvtoolError: `policy-broken` for scores of the wrong shape or NaN.
    """
    rules = Rules(Schedule((PromptEnd(step),)), protection)
    return run_schedule(layer, label, policy, budgets, rules, steps_ahead, allocator)


def run_schedule(
    layer: Layer,
    label: str,
    policy: Policy,
    budgets: Many[Budget],
    rules: Rules,
    steps_ahead: Tensor | None = None,
    allocator: Allocator | None = None,
    shared: dict[Any, Any] | None = None,
) -> list[RetainedSet]:
    """Move one cache per budget through the sequence.

    Args:
        layer: whose keys, values and earlier queries are scored.
        steps_ahead: [F] int64 steps that will be evaluated; oracles see those at or behind their event. None is
            every step with a query.
        shared: one for all policies on this layer (see `View.shared`); where times are measured each works alone.

    Returns:
        One retained set per budget, in order.

    Raises:
        KvtoolError: `policy-broken`; what the policy itself raises.
    """
    ahead = layer.query_steps if steps_ahead is None else steps_ahead
    shared = {} if shared is None or rules.timed or not built_in(policy) else shared
    first = First(shared=shared)
    return [
        Track(layer, label, policy, budget, rules, ahead, allocator or Uniform(), first).run() for budget in budgets
    ]


class Track:
    """One cache on its way.

    Args:
        ahead: [F] int64 steps that oracles may see, those before an event apart.
        first: what all budgets of the policy share.
    """

    def __init__(
        self,
        layer: Layer,
        label: str,
        policy: Policy,
        budget: Budget,
        rules: Rules,
        ahead: Tensor,
        allocator: Allocator,
        first: First,
    ) -> None:
        self._layer, self._label, self._policy, self._budget = layer, label, policy, budget
        self._rules, self._ahead, self._allocator, self._first = rules, ahead, allocator, first
        self._never = layer.tokens
        self._evict = RetainedSet.keep_all(layer.geometry.kv_heads, layer.tokens).evict_step  # [Hk, T]
        self._seen_from = oldest_rows(layer, first.shared)
        self._last_query = int(layer.query_steps[-1]) if layer.query_steps.numel() else -1
        self._whole = True  # nothing left yet
        self._state: Any = None
        self._observed = 0  # steps before it are in the state
        self._events: list[Event] = []

    @property
    def retained(self) -> RetainedSet:
        """What the events that have run decided."""
        return RetainedSet(self._evict, self._events)

    def run(self) -> RetainedSet:
        """Every event that the schedule makes due, in order."""
        for _ in self.events():
            pass
        return self.retained

    def events(self) -> Iterator[int]:
        """The step of every event, ascending, each before it runs: it does when the next one is asked for. Until
        then nothing at or behind that step was read, so whoever drives this may still be computing it."""
        schedule, layer = self._rules.schedule, self._layer
        skipped = self._policy.skips(layer.geometry)
        if skipped and schedule.repeats:
            return
        for event in schedule.events(layer.prompt_length, self._never, self._live):
            if event > self._last_query:
                return
            yield event
            if skipped:
                self._leave_whole(event)
            else:
                with sheltering(self._label, self._policy, layer):
                    self._evict_before(event)

    def _live(self, step: int) -> int:
        """Tokens in the fullest cache of a KV head that the query at `step` sees, without its own."""
        seen = self._evict[:, self._seen_from[step] : step]
        return int((seen == self._never).sum(1).max())

    def _rows(self, since: int, until: int) -> list[Tensor]:
        """Per KV head the rows in since..until-1 that were not evicted."""
        if self._whole:
            return [torch.arange(since, until)] * len(self._evict)
        return [since + (mine[since:until] == self._never).nonzero()[:, 0] for mine in self._evict]

    def _evict_before(self, step: int) -> None:
        rules, heads = self._rules, self._layer.geometry.kv_heads
        oldest = self._seen_from[step]
        rows = self._rows(oldest, step)
        counts = [len(mine) for mine in rows]
        found = torch.tensor(counts)
        # A ratio is of the tokens seen, whatever earlier events left of them.
        allowed = self._allocator.allocate(self._budget, step - oldest, heads)
        repeats = rules.schedule.repeats
        if repeats and all(count <= most for count, most in zip(counts, allowed, strict=True)):
            self._record(step, rows, found, allowed, untouched(rows), rules.protection, {}, None)
            return
        answer = self._answer(step, rows)
        view = answer.scored[0].view
        own = protection_of(self._label, self._policy, self._layer, view, allowed[0])
        self._first.shields.append(own)
        shield = own.union(Protection(rules.protection.sinks, rules.protection.window + rules.schedule.delay))
        limits = [min(most, len(mine)) for most, mine in zip(allowed, rows, strict=True)]
        block = rules.schedule.block
        begun = time.perf_counter()
        with watching() as seconds, stage("selection"):
            choice = choose(
                self._label,
                self._policy,
                self._layer,
                answer.scored,
                limits,
                shield,
                block=block,
                window_on_failure=repeats,
            )
        elapsed = answer.elapsed + time.perf_counter() - begun
        if rules.deadline_ms is not None and 1000 * elapsed > rules.deadline_ms:
            choice = newest(self._label, self._layer, rows, limits, shield, step, block)
        spent = {name: answer.seconds.get(name, 0.0) + seconds.get(name, 0.0) for name in {*answer.seconds, *seconds}}
        for mine, leaving, keep in zip(self._evict, rows, choice.keep, strict=True):
            if len(leaving) == step - oldest:  # all of them
                mine[oldest:step].masked_fill_(~keep, step)
            else:
                mine[leaving[~keep]] = step
        self._whole = False
        if rules.telemetry:
            spent["compaction"] = compact(self._layer, rows, choice.keep)
        self._record(step, rows, found, limits, choice, shield, spent, answer.temporary_bytes)

    def _answer(self, step: int, rows: list[Tensor]) -> Answer:
        """The policy's scores at an event, its state brought up to it."""
        untouched = self._observed == 0
        if untouched and step in self._first.answers:
            answer = self._first.answers[step]
        else:
            if untouched and not self._first.answers and self._rules.timed:
                # Reading the trace and warming up this process are no cost of the event.
                self._scores(self._observe(step), rows, step)
            begun = time.perf_counter()
            with TensorBytes.watched(self._rules.telemetry) as kept, watching() as seconds, stage("scoring"):
                state = self._observe(step)
                scored = self._scores(
                    state, rows, step, None if self._rules.timed or not untouched else self._first.shared
                )
            answer = Answer(state, scored, dict(seconds), time.perf_counter() - begun, kept.peak)
            if untouched:
                self._first.answers[step] = answer
        self._state, self._observed = answer.state, step
        return answer

    def _scores(self, state: Any, rows: list[Tensor], step: int, shared: dict[Any, Any] | None = None) -> list[Scored]:
        return score_caches(self._label, self._policy, self._layer, state, rows, step, self._later(step), shared)

    def _later(self, step: int) -> Tensor | None:
        """The steps that an oracle sees at an event."""
        return self._ahead[self._ahead >= step] if self._policy.oracle else None

    def _observe(self, step: int) -> Any:
        """The state after the steps since the last event. What was live at any of them is shown; where heads hold
        different numbers of tokens, rows that no step of these saw fill up the shorter ones."""
        start, layer = self._observed, self._layer
        live = self._rows(self._seen_from[start], step)
        longest = max(len(mine) for mine in live)
        tokens = torch.stack([filled(mine, longest, step) for mine in live])
        leaves = self._evict.to(torch.int64).gather(1, tokens)
        ahead = self._ahead if self._policy.oracle else None
        view = View(layer, step, tokens, start, leaves, ahead, shared=self._first.shared)
        state = self._state if start else started(self._label, self._policy, layer, view)
        return observed(self._label, self._policy, layer, state, view)

    def _leave_whole(self, step: int) -> None:
        rows = self._rows(self._seen_from[step], step)
        found = torch.tensor([len(mine) for mine in rows])
        self._record(step, rows, found, found.tolist(), untouched(rows), self._rules.protection, {}, None)

    def _record(
        self,
        step: int,
        rows: list[Tensor],
        found: Tensor,
        allowed: Many[int],
        choice: Choice,
        shield: Protection,
        seconds: dict[str, float],
        temporary_bytes: int | None,
    ) -> None:
        once = not self._rules.schedule.repeats
        by_token = self._rules.schedule.block == 1  # pages have ranks, their tokens have none of their own
        # One ranking stands for all budgets only where the protection does not depend on the budget.
        nested = self._policy.nested and self._first.shields[-1:] == self._first.shields[:1]
        ranking = choice.ranking if once and nested and by_token else None
        if once and step not in self._first.candidates:
            self._first.candidates[step] = torch.stack(rows)
        self._events.append(
            Event(
                step=step,
                candidates=self._first.candidates[step] if once else None,
                budget=torch.tensor(list(allowed)),
                achieved=choice.achieved,
                ties=choice.ties,
                margin=choice.margin,
                relative_margin=choice.relative_margin,
                near=choice.near,
                sinks=shield.sinks,
                window=shield.window,
                overfull=choice.overfull,
                ranking=ranking,
                diagnostics=choice.diagnostics,
                found=found,
                fallback=choice.fallback,
                seconds=seconds,
                temporary_bytes=temporary_bytes,
            )
        )
