"""Sets chosen together: two passes, greedy and exhaustive, against plain recomputation."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtool.budget import Budget
from kvtool.errors import KvtoolError
from kvtool.policies import Protection, policy_from_text
from kvtool.policies import capacity as capacity_module
from kvtool.policies.capacity_pool import Pool
from kvtool.policies.selectors import exhaustive, greedy, two_pass
from kvtool.replay.decide import decide
from kvtool.testing import example_layer, scores_at
from kvtool.view import View

CASES = ["", ",competition=centred", ",directions=outputs", ",group_stage=weight", ",ridge=relative"]


def policy(text):
    return policy_from_text(text)[1]


def pools(text, layer, step):
    view = View.at(layer, step)
    return [policy(text)._pool(view, head) for head in range(layer.geometry.kv_heads)]


def capacity(pool, chosen):
    """Nats of a set, one determinant per query head from scratch; the part of A without tokens counted out."""
    total = 0.0
    for h in range(len(pool.weights)):
        u = pool.directions[h % len(pool.directions)].to(torch.float64)
        base = pool.ridge[h] * torch.eye(u.shape[1], dtype=torch.float64)
        if pool.loose is not None:
            base = base + torch.outer(pool.loose[h], pool.loose[h])
        a = base.clone()
        for i in chosen:
            a = a + pool.weights[h, i] * torch.outer(u[i], u[i])
        total += 0.5 * float(torch.logdet(a) - torch.logdet(base))
    return total


def random_pool(stream, heads, count, width, *, loose=False, shared=False):
    return Pool(
        torch.rand(heads, count, generator=stream, dtype=torch.float64).square(),
        torch.randn(1 if shared else heads, count, width, generator=stream, dtype=torch.float64),
        torch.rand(heads, generator=stream, dtype=torch.float64) + 0.05,
        torch.randn(heads, width, generator=stream, dtype=torch.float64) if loose else None,
    )


def top(scores, count):
    newest_first = scores.flip(0).argsort(descending=True, stable=True)[:count]
    return {len(scores) - 1 - int(i) for i in newest_first}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("sinks", [False, True])
def test_greedy_equals_recomputing_every_determinant(case, sinks):
    layer = example_layer(26, dtype=torch.float64, stored=torch.float64, seed=4, sinks=sinks)
    for pool in pools(f"capacity:tau=1{case}", layer, 20):
        protected = torch.zeros(20, dtype=torch.bool)
        protected[[0, 18, 19]] = True
        chosen = {0, 18, 19}
        before = capacity(pool, chosen)
        scores, _ = greedy(pool, protected, 12, "mean")
        for budget in range(4, 13):
            gains = {i: capacity(pool, [*chosen, i]) for i in range(20) if i not in chosen}
            best = max(gains, key=gains.get)
            chosen.add(best)
            found, _ = greedy(pool, protected, budget, "mean")
            assert top(found, budget) == chosen
            assert float(scores[best]) == pytest.approx((gains[best] - before) / len(pool.weights), rel=1e-9)
            before = gains[best]
        assert top(scores, 12) == chosen


def test_greedy_ends_where_nothing_is_left_and_nests():
    pool = random_pool(torch.Generator().manual_seed(1), 3, 15, 4, shared=True)
    protected = torch.zeros(15, dtype=torch.bool)
    sets = [top(greedy(pool, protected, budget, "mean")[0], budget) for budget in range(1, 16)]
    assert all(small < large for small, large in itertools.pairwise(sets))
    assert sets[-1] == set(range(15))


def test_one_shot_leaves_out_what_is_said_often_and_greedy_says_it_once():
    """Five loud tokens share one direction, so each looks redundant; two quiet ones stand alone."""
    u = torch.zeros(1, 7, 3, dtype=torch.float64)
    u[0, :5, 0] = 10.0
    u[0, 5, 1] = u[0, 6, 2] = 1.02**0.5
    pool = Pool(torch.ones(1, 7, dtype=torch.float64), u, torch.ones(1, dtype=torch.float64))
    none = torch.zeros(7, dtype=torch.bool)
    assert top(pool.leverage(0.0).scores[0], 2) == {5, 6}
    assert top(greedy(pool, none, 2, "mean")[0], 2) == top(exhaustive(pool, none, 2)[0], 2) == {4, 6}


def test_of_equal_sets_the_newest_stays():
    pool = Pool(
        torch.ones(2, 6, dtype=torch.float64),
        torch.ones(1, 6, 3, dtype=torch.float64),
        torch.ones(2, dtype=torch.float64),
    )
    none = torch.zeros(6, dtype=torch.bool)
    assert top(greedy(pool, none, 3, "mean")[0], 3) == {3, 4, 5}
    assert top(exhaustive(pool, none, 3)[0], 3) == {3, 4, 5}
    assert top(two_pass(pool, torch.ones(6, dtype=torch.float64), none, 2, 0.0, "mean")[0], 2) == {4, 5}


def test_two_passes_by_hand():
    layer = example_layer(26, dtype=torch.float64, stored=torch.float64, seed=5)
    view, chosen = View.at(layer, 20), policy("capacity:tau=1,selector=two_pass,weight_eps=0.01,ridge=0.1")
    scores = chosen.score(None, view)
    refined = chosen.refine(scores, view, [6, 6], Protection(2, 3))
    for head in range(2):
        pool = chosen._pool(view, head)
        order = sorted(range(20), key=lambda i: (i < 2 or i >= 17, float(scores[head, i]), i), reverse=True)
        inside = sorted(order[:12])
        expected = torch.full((20,), -torch.inf, dtype=torch.float64)
        expected[inside] = 0.0
        for h in range(2):
            a = 0.1 * torch.eye(6, dtype=torch.float64)
            for i in inside:
                v = view.values[head, i]
                a = a + (pool.weights[h, i] + 0.01) * torch.outer(v, v)
            for i in inside:
                v = view.values[head, i]
                expected[i] += 0.5 * pool.weights[h, i] * (v @ torch.linalg.inv(a) @ v)
        assert torch.equal(refined[head].isfinite(), expected.isfinite())
        assert float((refined[head] - expected)[inside].abs().max()) < 1e-12
    assert torch.equal(chosen.refine(scores, view, [10, 10], Protection()), scores)  # 2B is everything


@given(
    seed=st.integers(0, 10_000),
    heads=st.integers(1, 3),
    count=st.integers(2, 9),
    width=st.integers(1, 6),
    loose=st.booleans(),
    data=st.data(),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_exhaustive_is_never_beaten(seed, heads, count, width, loose, data):
    pool = random_pool(torch.Generator().manual_seed(seed), heads, count, width, loose=loose)
    budget = data.draw(st.integers(1, count))
    protected = torch.zeros(count, dtype=torch.bool)
    protected[: data.draw(st.integers(0, budget - 1))] = True
    best = top(exhaustive(pool, protected, budget)[0], budget)
    assert len(best) == budget
    assert all(i in best for i in protected.nonzero()[:, 0].tolist())
    found = capacity(pool, best)
    held = set(protected.nonzero()[:, 0].tolist())
    free = [i for i in range(count) if i not in held]
    every = [capacity(pool, held | set(more)) for more in itertools.combinations(free, budget - len(held))]
    assert found == pytest.approx(max(every), rel=1e-9)
    assert capacity(pool, top(greedy(pool, protected, budget, "mean")[0], budget)) <= found + 1e-9 * abs(found)


@pytest.mark.parametrize("selector", ["two_pass", "greedy", "exhaustive"])
@pytest.mark.parametrize("case", CASES)
def test_a_decision_keeps_exactly_the_budget_and_the_protected(selector, case):
    layer = example_layer(22, dtype=torch.float64, seed=6, sinks=True)
    chosen = policy(f"capacity:tau=1,selector={selector}{case}")
    for kept in (1, 3, 4, 5, 9, 15, 16, 40):
        (decided,) = decide(layer, "it", chosen, [Budget.from_tokens(kept)], 16, Protection(1, 3), torch.arange(16, 22))
        alive = decided.evict_step[:, :16] == 22
        assert alive.sum(1).tolist() == [min(kept, 16)] * 2
        assert bool(alive[:, 0].all())
        assert bool(alive[:, 13:].all()) or kept < 4
        assert decided.events[0].ranking is None


def test_a_search_that_is_too_large_names_its_size():
    layer = example_layer(60)
    chosen = policy("capacity:selector=exhaustive")
    with pytest.raises(KvtoolError, match=r"137,846,528,820 sets of 20 of 40 tokens") as caught:
        decide(layer, "it", chosen, [Budget.from_tokens(25)], 45, Protection(2, 3), torch.arange(45, 60))
    assert caught.value.code == "usage"


@pytest.mark.parametrize("selector", ["two_pass", "greedy"])
def test_what_refine_is_given_stays_as_it_was_and_one_shot_returns_it(selector):
    layer = example_layer(40)
    view = View.at(layer, 32)
    scores = scores_at(policy("capacity"), layer, 32)
    before = scores.clone()
    chosen = policy(f"capacity:selector={selector}")
    assert chosen.refine(scores, view, [9, 9], Protection()) is not scores
    assert torch.equal(scores, before)
    assert policy("capacity").refine(scores, view, [9, 9], Protection()) is scores
    assert not chosen.nested
    assert policy("capacity").nested


def test_the_objective_is_the_capacity_that_greedy_and_exhaustive_raise():
    """1/2 logdet(I + sum w u u^T / ridge) from the objective alone equals the pool's own."""
    layer = example_layer(26, dtype=torch.float64, stored=torch.float64, seed=8, sinks=True)
    for case in CASES:
        chosen = policy(f"capacity:tau=1{case}")
        view = View.at(layer, 20)
        told = chosen.objective(view)
        assert told.weights.shape == (4, 20)
        assert told.directions.shape == (4, 20, 6)
        kept = [1, 5, 6, 17]
        for head, pool in enumerate(pools(f"capacity:tau=1{case}", layer, 20)):
            total = 0.0
            for h in (2 * head, 2 * head + 1):
                a = torch.eye(6, dtype=torch.float64)
                for i in kept:
                    u = told.directions[h, i]
                    a = a + told.weights[h, i] * torch.outer(u, u) / told.ridge[h]
                total += 0.5 * float(torch.logdet(a))
            assert total == pytest.approx(capacity(pool, kept) * 2 / len(pool.weights), rel=1e-10)


@pytest.mark.parametrize("loose", [False, True])
def test_absorbed_directions_have_the_same_log_determinants(loose):
    """A part of A that no token brings, whitened into the directions, leaves every set's gain as it was."""
    pool = random_pool(torch.Generator().manual_seed(6), 2, 7, 3, loose=loose)
    absorbed = Pool(pool.weights, pool.absorbed(), pool.ridge)
    assert float((pool.ridge - 1).abs().min()) > 0.05
    for chosen in ([2], [0, 3], [1, 2, 4, 6], list(range(7))):
        assert capacity(absorbed, chosen) == pytest.approx(capacity(pool, chosen), rel=1e-12)


def test_trouble_at_one_budget_is_not_said_of_another():
    """All budgets share the scores of a first event; what greedy selection meets at one belongs to that one."""
    layer, chosen = example_layer(60, seed=3), policy("capacity:selector=greedy")
    budgets = [Budget.from_tokens(n) for n in (8, 20, 33)]

    def fails_at_20(pool, protected, budget, group):
        if budget == 20:
            raise ValueError("no factor")
        return greedy(pool, protected, budget, group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capacity_module, "greedy", fails_at_20)
        decided = decide(layer, "it", chosen, budgets, 45, Protection(2, 3), torch.arange(45, 60))
    said = [bool((one.events[0].diagnostics["fallback"] > 0).any()) for one in decided]
    assert said == [False, True, False]
