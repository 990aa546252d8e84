"""Exact search: its order, its bounds, what it refuses; the selectors beside it; how sub-pools are drawn."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtool.decomposition import selectors
from kvtool.decomposition.capacity import Centre, OwnObjective, Tangents
from kvtool.decomposition.damage import Damage, halves
from kvtool.decomposition.ladder import damages, study
from kvtool.decomposition.local_fit import LocalFit
from kvtool.decomposition.search import Best, check_search, number_of, smallest, subsets
from kvtool.decomposition.subpools import SubPool, draw
from kvtool.errors import KvtoolError
from kvtool.policies.objective import Objective

F64 = torch.float64


@st.composite
def pools(draw_from):
    """Sub-pools of up to 8 tokens: hot and cold logits, repeated, nearly repeated and silent tokens."""
    n = draw_from(st.integers(1, 8))
    keep = draw_from(st.integers(1, n))
    group, steps = draw_from(st.integers(1, 3)), draw_from(st.integers(1, 6))
    dim, value_dim = draw_from(st.integers(1, 6)), draw_from(st.integers(1, 6))
    g = torch.Generator().manual_seed(draw_from(st.integers(0, 2**31)))

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=F64)

    keys, values = normal(n, dim) * draw_from(st.sampled_from([0.0, 0.3, 1.0, 10.0, 60.0])), normal(n, value_dim)
    values = values * draw_from(st.sampled_from([0.0, 1e-9, 1.0, 1e6])) + draw_from(st.sampled_from([0.0, 100.0]))
    close = draw_from(st.sampled_from([None, 0.0, 1e-15, 1e-13, 1e-11, 1e-8]))
    if close is not None:
        source = torch.randint(0, n, (n,), generator=g)
        keys = keys[source] * (1 + close * normal(n, 1))
        values = values[source] * (1 + close * normal(n, 1))
    mean = normal(group, dim)
    queries = mean[:, None] + normal(group, steps, dim) * draw_from(st.sampled_from([0.0, 1.0]))
    root = normal(group, dim, dim) * draw_from(st.sampled_from([0.0, 1e-6, 1.0]))
    weights = torch.rand(group, n, generator=g, dtype=F64) * draw_from(st.sampled_from([0.0, 1e-9, 1.0, 1e6]))
    return keep, SubPool(
        queries=queries,
        keys=keys,
        values=values,
        rows=torch.arange(n),
        scale=0.5,
        softcap=draw_from(st.sampled_from([None, 2.0, 30.0])),
        sink_logits=draw_from(st.sampled_from([None, normal(group), normal(group) + 50.0])),
        mean=mean,
        covariance=root @ root.transpose(1, 2),
        objective=Objective(weights, values.expand(group, -1, -1), torch.full((group,), 0.7, dtype=F64)),
        one_shot=torch.randperm(n, generator=g)[:keep],
    )


def searches(pool, keep):
    """(name, bounds [S], evaluate) of everything that is searched."""
    centre, damage = Centre.of(pool), Damage(pool)
    own, fit = OwnObjective(pool.objective), LocalFit(pool, centre, damage)
    tangents = Tangents(pool, centre, torch.full((pool.heads,), 0.1, dtype=F64))
    full, ren = tangents.bounds(keep)
    return [
        ("damage", damage.bounds(keep), damage.of),
        ("own", own.bounds(keep), own.of),
        ("full", full, lambda kept: tangents.of(kept, centre.pool_weights)),
        ("ren", ren, lambda kept: tangents.of(kept, centre.own_weights)),
        ("lin", fit.bounds(keep), fit.of),
    ]


@settings(max_examples=100, deadline=None)
@given(pools())
def test_no_bound_is_above_its_value(case):
    keep, pool = case
    every = subsets(pool.tokens, keep)
    for name, bound, evaluate in searches(pool, keep):
        value, noise = evaluate(every)
        assert not bool((bound > value + noise).any()), name  # NaN says nothing
        assert bool(torch.isfinite(value).all()), name
        assert bool((noise >= 0).all()), name


@settings(max_examples=100, deadline=None)
@given(pools())
def test_the_exact_best_is_never_beaten(case):
    keep, pool = case
    every = subsets(pool.tokens, keep)
    for name, bound, evaluate in searches(pool, keep):
        best = smallest(bound, lambda n, _, of=evaluate: of(every[n]), [0])
        value, noise = evaluate(every)
        assert bool((value + noise >= best.value - best.noise).all()), name
        tied = value - noise <= (value + noise)[value.argmin()]  # the loop: newest of those that rounding cannot tell
        assert best.number == int(tied.nonzero()[0, 0]), name
        assert best.value == pytest.approx(float(value[best.number]), rel=1e-12, abs=best.noise)


@settings(max_examples=100, deadline=None)
@given(pools())
def test_gaps_are_never_negative(case):
    keep, pool = case
    values = study(pool, keep, torch.full((pool.heads,), 0.3, dtype=F64)).values
    gaps = [value for name, value in values.items() if "gap" in name or name == "ladder_total"]
    assert len(gaps) == 10
    assert all(gap is not None and gap >= 0 for gap in gaps)
    assert values["ladder_linearity"] >= 0


def random_pool(n, *, seed=0, steps=40, dim=16, value_dim=16, group=2):
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=F64)

    mean, root, values = normal(group, dim), normal(group, dim, dim), normal(n, value_dim)
    objective = Objective(torch.rand(group, n, generator=g, dtype=F64), values.expand(group, -1, -1), torch.ones(2))
    return SubPool(
        queries=mean[:, None] + normal(group, steps, dim),
        keys=normal(n, dim),
        values=values,
        rows=torch.arange(n),
        scale=0.25,
        softcap=None,
        sink_logits=normal(group),
        mean=mean,
        covariance=root @ root.transpose(1, 2) / dim,
        objective=objective,
        one_shot=torch.arange(n // 2),
    )


@pytest.mark.parametrize(("n", "keep"), [(12, 6), (13, 4), (11, 9)])
def test_bounds_are_tight_and_in_the_order_of_the_subsets(n, keep):
    pool = random_pool(n)
    every = subsets(n, keep)
    for name, bound, evaluate in searches(pool, keep):
        value, _ = evaluate(every)
        assert float((value - bound).max()) < 1e-8 * float(value.abs().max()), name
        assert float(value.max() - value.min()) > 1e-2 * float(value.abs().max()), name


@pytest.mark.parametrize("apart", [1e-13, 1e-11, 1e-9, 1e-7])
def test_near_ties_are_decided_by_the_definition(apart):
    """Twins that differ by next to nothing: bounds cannot tell them apart, the answer must."""
    pool = random_pool(10, seed=3)
    for turn in range(6):
        pool.values[8] = pool.values[2] * (1 + apart * (-1) ** turn * (turn + 1))
        pool.keys[8] = pool.keys[2]
        found = damages(pool, 4).best
        value, noise = Damage(pool).of(subsets(10, 4))
        assert found.number == int((value - noise <= (value + noise)[value.argmin()]).nonzero()[0, 0])


def test_given_up_sets_are_above_the_limit():
    damage = Damage(random_pool(10))
    every = subsets(10, 5)
    whole, _ = damage.of(every)
    limit = float(whole.quantile(0.2))
    part, noise = damage.of(every, limit)
    assert torch.equal(part == torch.inf, whole - noise > limit)
    assert bool((part[part < torch.inf] - whole[part < torch.inf]).abs().max() < 1e-12 * limit)
    assert 0 < int((part < torch.inf).sum()) < 60


@pytest.mark.parametrize(("n", "keep"), [(1, 1), (2, 1), (5, 2), (6, 6), (7, 4), (9, 3)])
def test_subsets_come_newest_first(n, keep):
    every = subsets(n, keep)
    written = [tuple(sorted(kept, reverse=True)) for kept in itertools.combinations(range(n), keep)]
    assert [tuple(kept) for kept in every.tolist()] == sorted(written, reverse=True)
    assert [number_of(kept.long().flip(0), n) for kept in every] == list(range(len(written)))
    seen = []
    for older, newer, numbers in halves(n, keep):
        assert bool((older[:, 0] == 1).all())
        for (i, a), (j, b) in itertools.product(enumerate(older), enumerate(newer)):
            kept = torch.cat([a[1:], b]).nonzero()[:, 0].flip(0)
            assert every[numbers[i, j]].tolist() == kept.tolist()
            seen.append(int(numbers[i, j]))
    assert sorted(seen) == list(range(math.comb(n, keep)))


@pytest.mark.parametrize(
    ("n", "keep", "words"),
    [
        (24, 12, "2,704,156 subsets, more than 2,000,000"),
        (64, 32, "subsets, more than"),
        (65, 1, "65 tokens"),
        (5, 0, "cannot keep 0"),
    ],
)
def test_too_much_is_refused_with_its_number(n, keep, words):
    with pytest.raises(KvtoolError, match=words) as caught:
        check_search(n, keep)
    assert caught.value.code == "usage"
    assert check_search(23, 10) == 1_144_066


def test_a_search_leaves_the_number_of_threads_alone():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        damages(random_pool(8), 4)
        assert torch.get_num_threads() == 2
        with pytest.raises(KvtoolError):
            damages(random_pool(8), 9)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def table(values, noise=0.0):
    """An evaluate over plain numbers, and the list of what was asked."""
    asked = []

    def evaluate(numbers, limit):
        asked.append(numbers.tolist())
        return torch.tensor(values, dtype=F64)[numbers], torch.full((len(numbers),), noise, dtype=F64)

    return evaluate, asked


def test_the_newest_of_ties_wins_and_little_is_evaluated():
    values = [5.0, 1.0, 3.0, 1.0, 0.5 + 0.5, 9.0]
    evaluate, asked = table(values)
    assert smallest(torch.tensor(values, dtype=F64) - 0.1, evaluate, [3]) == Best(1, 1.0, 0.0)
    assert asked == [[1, 3], [1, 3, 4]]
    evaluate, _ = table([1.0 + 1e-9, 1.0, 3.0], noise=1e-9)
    assert smallest(torch.zeros(3), evaluate, [2]).number == 0
    evaluate, _ = table([2.0, 1.0, 3.0])
    assert smallest(torch.tensor([0.0, torch.nan, 0.0]), evaluate, [2]).number == 1


def test_a_bound_that_rules_everything_out_is_a_fault():
    evaluate, _ = table([1.0, 2.0])
    with pytest.raises(KvtoolError, match="ruled out") as caught:
        smallest(torch.tensor([7.0, 7.0]), evaluate, [0])
    assert caught.value.code == "internal"


def test_settling_another_value_beside_the_best():
    best = Best(0, 1.0, 1e-10)
    assert best.settle(1.5, 0.0, "x") == 1.5
    assert best.settle(1.0 + 1e-10, 1e-10, "x") == 1.0
    assert best.settle(1.0 - 1e-10, 1e-10, "x") == 1.0
    with pytest.raises(KvtoolError, match="in x was beaten"):
        best.settle(0.9, 1e-10, "x")


def determinant(objective, kept):
    total = 0.0
    for w, u, ridge in zip(objective.weights, objective.directions, objective.ridge, strict=True):
        matrix = torch.eye(u.shape[1], dtype=F64) + (w[kept, None] * u[kept]).T @ u[kept] / ridge
        total += 0.5 * math.log(float(torch.linalg.det(matrix)))
    return total


@pytest.mark.parametrize("seed", range(4))
def test_greedy_takes_the_largest_determinant_each_step(seed):
    pool = random_pool(9, seed=seed, value_dim=5)
    own, kept = OwnObjective(pool.objective), []
    for _ in range(5):
        left = [token for token in range(9) if token not in kept]
        kept.append(max(left, key=lambda token: determinant(pool.objective, [*kept, token])))
    assert selectors.greedy(lambda sets: own.of(sets)[0], 9, 5).tolist() == kept


@pytest.mark.parametrize("seed", range(4))
def test_greedy_by_damage_is_the_same_with_and_without_bounds(seed):
    pool = random_pool(9, seed=seed)
    damage, kept = Damage(pool), []
    for _ in range(4):
        left = [token for token in range(9) if token not in kept]
        kept.append(min(left, key=lambda token: float(damage.of(torch.tensor([[*kept, token]]))[0])))
    assert selectors.greedy(lambda sets: damage.of(sets)[0], 9, 4, damage.addition_bounds).tolist() == kept
    assert damages(pool, 4).greedy.tolist() == kept


def leverages(objective, inside):
    scores = torch.zeros(len(inside), dtype=F64)
    for w, u, ridge in zip(objective.weights, objective.directions, objective.ridge, strict=True):
        matrix = ridge * torch.eye(u.shape[1], dtype=F64)
        for i in inside:
            matrix = matrix + w[i] * torch.outer(u[i], u[i])
        inverse = torch.linalg.inv(matrix)
        scores += torch.stack([w[i] * (u[i] @ inverse @ u[i]) for i in inside]) / len(objective.weights)
    return scores


@pytest.mark.parametrize("keep", [2, 3, 5, 8])
def test_two_passes_by_hand(keep):
    objective = random_pool(9, seed=7, value_dim=4).objective
    score = selectors.leverage(objective)
    assert float((score(torch.arange(9)) - leverages(objective, list(range(9)))).abs().max()) < 1e-13
    first = leverages(objective, list(range(9))).topk(min(2 * keep, 9)).indices.sort().values
    second = first[leverages(objective, first.tolist()).topk(keep).indices]
    found = selectors.two_pass(score, 9, keep)
    assert found.tolist() == second.tolist()
    once = selectors.one_shot(score, 9, keep)
    assert once.tolist() == leverages(objective, list(range(9))).topk(keep).indices.tolist()


def test_two_passes_by_damage_drop_what_is_missed_least():
    pool = random_pool(9, seed=2)
    damage = Damage(pool)

    def missed(inside):
        return [float(damage.of(torch.tensor([[j for j in inside if j != i]]))[0]) for i in inside]

    first = torch.tensor(missed(list(range(9)))).topk(6).indices.sort().values
    second = first[torch.tensor(missed(first.tolist())).topk(3).indices]
    assert damages(pool, 3).two_pass.tolist() == second.tolist()


def test_equal_scores_keep_the_newer_token():
    assert selectors.largest(torch.tensor([1.0, 3.0, 1.0, 3.0 + 1e-15, 0.0]), 4).tolist() == [3, 1, 2, 0]
    assert selectors.largest(torch.tensor([-1.0, -1.0, -2.0]), 3).tolist() == [1, 0, 2]
    assert selectors.greedy(lambda sets: torch.zeros(len(sets), dtype=F64), 5, 3).tolist() == [4, 3, 2]


def test_sub_pools_are_drawn_from_the_given_stream():
    drawn = draw(np.random.default_rng(5), 40, 16, 64)
    assert drawn.shape == (64, 16)
    assert torch.equal(drawn, draw(np.random.default_rng(5), 40, 16, 64))
    assert not torch.equal(drawn, draw(np.random.default_rng(6), 40, 16, 64))
    assert bool((drawn.diff(dim=1) > 0).all())
    assert (int(drawn.min()), int(drawn.max())) == (0, 39)
    share = drawn.flatten().bincount(minlength=40) / 64
    assert 0.15 < float(share.min()) < 0.4 < float(share.max()) < 0.65
    assert torch.equal(drawn[:3], draw(np.random.default_rng(5), 40, 16, 3))


def test_few_candidates_are_one_sub_pool():
    rng = np.random.default_rng(0)
    assert draw(rng, 5, 5, 64).tolist() == [[0, 1, 2, 3, 4]]
    assert draw(rng, 3, 5, 64).tolist() == [[0, 1, 2]]
    assert draw(rng, 0, 5, 64).shape == (0, 5)
    for tokens, samples in ((0, 4), (4, 0)):
        with pytest.raises(KvtoolError, match="at least 1"):
            draw(rng, 9, tokens, samples)
