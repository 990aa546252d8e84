"""What a schedule promises about the size of the cache, whatever the policy."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from formulas import POLICIES
from layers import LAYERS, make

from kvtool.budget import Budget
from kvtool.layer import Layer
from kvtool.policies import Protection, policy_from_text
from kvtool.replay.decide import decide, run_schedule
from kvtool.replay.rules import Rules
from kvtool.retained import RetainedSet
from kvtool.schedule import parse_schedule
from kvtool.selection import select
from kvtool.testing import scores_at

make_once = cache(make)
SOME = ("streaming-llm:sinks=2", "knorm", "tova", "h2o", "keydiff:recent=0.3", "random", "oracle-mass")


def run(layer: Layer, text: str, word: str, budget: int, sinks: int = 1, window: int = 2) -> RetainedSet:
    rules = Rules(parse_schedule(word), Protection(sinks, window))
    return run_schedule(layer, text, policy_from_text(text)[1], [Budget.from_tokens(budget)], rules)[0]


def live(retained: RetainedSet, layer: Layer) -> list[int]:
    """Per step the tokens that its query sees, its own included, in the fullest KV head."""
    rows = torch.arange(layer.tokens)
    first = layer.geometry.first_visible(rows)
    return [int((retained.retained(t) & (rows >= first[t])).sum(1).max()) for t in range(layer.tokens)]


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("text", SOME)
@pytest.mark.parametrize("budget", [1, 6])
def test_the_cache_never_outgrows_what_was_promised(text: str, name: str, budget: int) -> None:
    layer = make_once(name, 40, 25)
    for interval in (1, 5):
        for order, extra in (("", 0), ("/after", 1)):
            since = 25 + extra
            sizes = live(run(layer, text, f"every:{interval}{order}", budget), layer)
            assert max(sizes[since:]) <= budget + interval
        sizes = live(run(layer, text, f"every:{interval},from:0", budget), layer)
        assert max(sizes) <= budget + interval
    for mark in (budget + 1, budget + 5):
        assert max(live(run(layer, text, f"high-water:{mark},from:0", budget), layer)) <= mark
        assert max(live(run(layer, text, f"high-water:{mark}", budget), layer)[25:]) <= mark
        assert max(live(run(layer, text, f"high-water:{mark},from:0/after", budget), layer)) <= mark + 1
    for block in (1, 6):
        sizes = live(run(layer, text, f"prefill:{block}", budget), layer)
        assert max(sizes[:25]) <= budget + block
        assert sizes[25] <= budget + 1


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("text", SOME)
def test_protected_rows_stay_unless_they_alone_exceed_the_budget(text: str, name: str) -> None:
    layer, overfull = make_once(name, 40, 25), 0
    for word in ("every:1,from:0", "every:3,from:5/after", "prefill:4", "high-water:9,from:0/delay:2"):
        for budget, sinks, window in ((8, 2, 3), (5, 4, 4)):
            retained = run(layer, text, word, budget, sinks, window)
            for event in retained.events:
                gone = (retained.evict_step == event.step).nonzero()[:, 1].tolist()
                if event.overfull:
                    overfull += 1
                    continue
                assert all(sinks <= row < event.step - window for row in gone), (word, event.step)
                assert all(event.sinks <= row < event.step - event.window for row in gone), (word, event.step)
    assert overfull or layer.geometry.kind == "chunked"


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("text", SOME)
def test_what_left_never_returns_and_nothing_leaves_before_it_came(text: str, name: str) -> None:
    layer = make_once(name, 40, 25)
    for word in ("every:1,from:0", "prefill:3+every:5/after", "high-water:6,from:2/block:4"):
        retained = run(layer, text, word, 4)
        masks = [retained.retained(t) for t in range(layer.tokens)]
        for t in range(1, layer.tokens):
            assert not bool((masks[t][:, :t] & ~masks[t - 1][:, :t]).any())
        assert bool((retained.evict_step > torch.arange(layer.tokens)).all())
        steps = {event.step for event in retained.events}
        assert set(retained.evict_step.flatten().tolist()) - {layer.tokens} <= steps
        for event in retained.events:
            assert int((retained.evict_step == event.step).sum()) == int((event.found - event.achieved).sum())


@pytest.mark.parametrize("block", [2, 4, 7])
@pytest.mark.parametrize("name", LAYERS)
def test_pages_leave_whole_in_all_heads_and_never_the_one_being_filled(name: str, block: int) -> None:
    layer, freed = make_once(name, 40, 25), 0
    for text in ("h2o", "knorm", "random"):
        for word in (f"every:1,from:0/block:{block}", f"every:3/after/block:{block}", f"prefill:5/block:{block}"):
            retained = run(layer, text, word, 4, 1, 1)
            evict = retained.evict_step
            assert torch.equal(evict, evict[:1].expand_as(evict))
            for event in retained.events:
                gone = {row for row in range(layer.tokens) if int(evict[0, row]) == event.step}
                seen = int(layer.geometry.first_visible(torch.tensor(event.step)))
                before = {row for row in range(seen, event.step) if int(evict[0, row]) >= event.step}
                for page in {row // block for row in gone}:
                    assert {row for row in before if row // block == page} <= gone
                    assert (page + 1) * block <= event.step  # it is full: no row is still to come
                    freed += 1
                assert len(before - gone) <= max(4, block) or event.overfull
    assert freed > 10 or (layer.geometry.kind == "chunked" and block > 2)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("text", POLICIES)
def test_a_single_event_is_one_cut_of_one_ranking(text: str, name: str) -> None:
    """The loop, `decide` and a plain cut of the policy's scores on an untouched cache agree bit for bit."""
    layer, policy, step = make_once(name), policy_from_text(text)[1], 18
    ahead = torch.arange(step, layer.tokens)
    scores = scores_at(policy, layer, step)
    first = int(layer.geometry.first_visible(torch.tensor(step)))
    tokens = torch.arange(first, step).expand(layer.geometry.kv_heads, -1)
    budgets = [Budget.from_tokens(5), Budget.from_ratio("0.25"), Budget.from_tokens(99)]
    by_loop = run_schedule(layer, text, policy, budgets, Rules(parse_schedule("prompt-end"), Protection(1, 2)))
    by_decide = decide(layer, text, policy, budgets, step, Protection(1, 2), ahead)
    for budget, loop, single in zip(budgets, by_loop, by_decide, strict=True):
        keep = budget.resolve(step - first)
        shield = policy.protection(keep).union(Protection(1, 2))
        cut = select(scores, tokens, [keep] * len(tokens), sinks=shield.sinks, window=shield.window, step=step)
        expected = torch.full((len(tokens), layer.tokens), layer.tokens, dtype=torch.int32)
        expected[:, first:step] = torch.where(cut.keep, layer.tokens, step).to(torch.int32)
        assert torch.equal(loop.evict_step, expected)
        assert torch.equal(single.evict_step, expected)
        for one in (loop, single):
            (event,) = one.events
            assert torch.equal(event.margin.nan_to_num(-1.0), cut.margin.nan_to_num(-1.0))
            assert event.ties.tolist() == cut.ties.tolist()
            assert torch.equal(event.candidates, tokens)
