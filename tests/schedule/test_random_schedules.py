"""Schedules, layers, budgets and protections drawn at random, against the dumb loop."""

from __future__ import annotations

from fractions import Fraction
from functools import cache

from dumb import simulate
from formulas import POLICIES
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import LAYERS, make

from kvtool.budget import Budget
from kvtool.layer import Layer
from kvtool.policies import Protection, policy_from_text
from kvtool.replay.decide import run_schedule
from kvtool.replay.rules import Rules
from kvtool.schedule import parse_schedule

QUICK = ("streaming-llm:sinks=2", "knorm", "tova", "h2o", "snapkv:window=3,kernel=3", "keydiff:recent=0.3")
make_once = cache(make)


@st.composite
def words(draw: st.DrawFn) -> str:
    """A schedule as it is typed."""
    start = st.sampled_from(["", ",from:0", ",from:3", ",from:40"])
    triggers = {
        "prompt-end": st.just(""),
        "at": st.integers(1, 25).map(":{}".format),
        "every": st.tuples(st.integers(1, 30), start).map(lambda x: f":{x[0]}{x[1]}"),
        "high-water": st.tuples(st.integers(2, 30), start).map(lambda x: f":{x[0]}{x[1]}"),
        "prefill": st.integers(1, 30).map(":{}".format),
    }
    names = draw(st.lists(st.sampled_from(list(triggers)), min_size=1, max_size=3))
    word = "+".join(name + draw(triggers[name]) for name in names)
    word += draw(st.sampled_from(["", "", "/after"]))
    word += draw(st.sampled_from(["", "", "/delay:1", "/delay:5", "/delay:99"]))
    return word + draw(st.sampled_from(["", "", "/block:2", "/block:5", "/block:64"]))


@st.composite
def layers(draw: st.DrawFn) -> Layer:
    tokens = draw(st.sampled_from([2, 3, 17, 24]))
    return make_once(draw(st.sampled_from(list(LAYERS))), tokens, draw(st.integers(1, tokens)))


BUDGETS = st.one_of(st.integers(1, 30), st.fractions(0, Fraction(19, 20), max_denominator=20))


@settings(max_examples=250, deadline=None, derandomize=True)
@given(
    layer=layers(),
    word=words(),
    budget=BUDGETS,
    text=st.sampled_from(QUICK),
    sinks=st.integers(0, 5),
    late=st.booleans(),
)
def test_any_schedule_equals_the_dumb_loop(
    layer: Layer, word: str, budget: int | Fraction, text: str, sinks: int, late: bool
) -> None:
    scores, own = POLICIES[text]
    asked = Budget.from_tokens(budget) if isinstance(budget, int) else Budget.from_ratio(budget)
    rules = Rules(parse_schedule(word), Protection(sinks, sinks // 2), 1e-9 if late else None)
    (found,) = run_schedule(layer, text, policy_from_text(text)[1], [asked], rules)
    dumb = simulate(layer, word, budget, scores, sinks=sinks, window=sinks // 2, own=own, too_slow=late)
    assert found.evict_step.tolist() == dumb.evict_step()
    assert [event.step for event in found.events] == dumb.events


@settings(max_examples=100, deadline=None, derandomize=True)
@given(word=words())
def test_a_schedule_is_read_as_it_is_written(word: str) -> None:
    schedule = parse_schedule(word)
    assert parse_schedule(str(schedule)) == schedule


@settings(max_examples=60, deadline=None, derandomize=True)
@given(layer=layers(), word=words(), budgets=st.lists(st.integers(1, 30), min_size=2, max_size=4))
def test_budgets_of_one_run_do_not_touch_each_other(layer: Layer, word: str, budgets: list[int]) -> None:
    policy, rules = policy_from_text("h2o")[1], Rules(parse_schedule(word), Protection(1, 1))
    asked = [Budget.from_tokens(budget) for budget in budgets]
    together = run_schedule(layer, "h2o", policy, asked, rules)
    alone = [run_schedule(layer, "h2o", policy, [budget], rules)[0] for budget in asked]
    assert [one.digest() for one in together] == [one.digest() for one in alone]
