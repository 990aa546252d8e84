"""The regret ladder against loops over every subset that form every matrix of the definitions."""

import dataclasses
import itertools
import math

import pytest
import torch

from kvtool.decomposition import capacity, damage, local_fit, split_masks
from kvtool.decomposition.ladder import COLUMNS, RUNGS, STEPS, Study, SubPool, damages, study, summarize
from kvtool.decomposition.search import Best
from kvtool.errors import KvtoolError
from kvtool.policies.objective import Objective

F64 = torch.float64


def make_pool(n, b, *, group=2, steps=5, dim=4, value_dim=3, seed=0, sink=False, softcap=None, heat=1.0):
    """A random sub-pool; `heat` widens the logits."""
    g = torch.Generator().manual_seed(1000 * n + 10 * b + seed)

    def draw(*shape):
        return torch.randn(*shape, generator=g, dtype=F64)

    mean = draw(group, dim)
    queries = mean[:, None] + draw(group, steps, dim)
    spread = draw(group, dim, dim)
    values = draw(n, value_dim)
    weights = torch.rand(group, n, generator=g, dtype=F64)
    return SubPool(
        queries=queries,
        keys=heat * draw(n, dim),
        values=values,
        rows=torch.arange(n) * 3 + 1,
        scale=0.6,
        softcap=softcap,
        sink_logits=draw(group) if sink else None,
        mean=mean,
        covariance=spread @ spread.transpose(1, 2) / dim,
        objective=Objective(weights, values.expand(group, -1, -1), 0.5 + torch.rand(group, generator=g, dtype=F64)),
        one_shot=torch.randperm(n, generator=g)[:b],
    )


class Dumb:
    """Section by section, one query, one head, one subset at a time."""

    def __init__(self, pool, sigma2):
        self.pool, self.sigma2 = pool, sigma2
        self.all = list(range(pool.tokens))
        self.full = [[self.output(h, q, self.all) for q in pool.queries[h]] for h in range(pool.heads)]

    def logit(self, q, i):
        z = self.pool.scale * float(q @ self.pool.keys[i])
        return z if self.pool.softcap is None else self.pool.softcap * math.tanh(z / self.pool.softcap)

    def attention(self, h, q, kept):
        z = [self.logit(q, i) for i in kept]
        sinks = [] if self.pool.sink_logits is None else [float(self.pool.sink_logits[h])]
        top = max(z + sinks)
        total = math.fsum(math.exp(x - top) for x in z + sinks)
        return [math.exp(x - top) / total for x in z]

    def output(self, h, q, kept):
        return sum(a * self.pool.values[i] for a, i in zip(self.attention(h, q, kept), kept, strict=True))

    def damage(self, kept):
        total = 0.0
        for h in range(self.pool.heads):
            for t, q in enumerate(self.pool.queries[h]):
                total += float((self.full[h][t] - self.output(h, q, kept)).square().sum())
        return total

    def tangent(self, h, kept, a):
        """[Dv, D] with S_C formed."""
        a = torch.tensor(a, dtype=F64)
        cap = self.pool.softcap
        slope = [1.0 if cap is None else 1 - (self.logit(self.pool.mean[h], i) / cap) ** 2 for i in kept]
        keys = torch.stack([d * self.pool.keys[i] for d, i in zip(slope, kept, strict=True)])
        return self.pool.scale * self.pool.values[kept].T @ (torch.diag(a) - torch.outer(a, a)) @ keys

    def capacity(self, kept, pool_weights):
        total = 0.0
        for h in range(self.pool.heads):
            mean = self.pool.mean[h]
            a = self.attention(h, mean, kept)
            if pool_weights:
                whole = self.attention(h, mean, self.all)
                a = [whole[i] for i in kept]
            j = self.tangent(h, kept, a)
            eye = torch.eye(j.shape[0], dtype=F64)
            total += 0.5 * float(torch.logdet(eye + j @ self.pool.covariance[h] @ j.T / self.sigma2[h]))
        return total

    def own(self, kept):
        objective, total = self.pool.objective, 0.0
        for h in range(self.pool.heads):
            matrix = torch.eye(objective.directions.shape[2], dtype=F64)
            for i in kept:
                u = objective.directions[h, i]
                matrix += objective.weights[h, i] * torch.outer(u, u) / objective.ridge[h]
            total += 0.5 * float(torch.logdet(matrix))
        return total

    def misfit(self, kept):
        total = 0.0
        for h in range(self.pool.heads):
            mean = self.pool.mean[h]
            j = self.tangent(h, kept, self.attention(h, mean, kept))
            there = self.output(h, mean, kept)
            for t, q in enumerate(self.pool.queries[h]):
                total += float((self.full[h][t] - there - j @ (q - mean)).square().sum())
        return total

    def best(self, value, keep, scale):
        """The smallest, ties to the newest: subsets are met newest first."""
        found = [
            (value(sorted(kept)), sorted(kept))
            for kept in itertools.combinations(range(self.pool.tokens - 1, -1, -1), keep)
        ]
        least = min(v for v, _ in found)
        return next(kept for v, kept in found if v <= least + 1e-12 * abs(least) + 1e-13 * scale), least


def duplicated(pool):
    """Half of the tokens twice, so that many subsets do exactly the same."""
    twice = torch.arange(pool.tokens) // 2
    own = pool.objective
    return dataclasses.replace(
        pool,
        keys=pool.keys[twice],
        values=pool.values[twice],
        objective=Objective(own.weights[:, twice], own.directions[:, twice], own.ridge),
    )


def one_dominant(pool):
    keys = pool.keys.clone()
    keys[1] = 4 * pool.mean.sum(0)
    return dataclasses.replace(pool, keys=keys)


def collinear(pool):
    values = pool.values[:1] * torch.linspace(-1, 2, pool.tokens, dtype=F64)[:, None]
    own = pool.objective
    return dataclasses.replace(
        pool, values=values, objective=Objective(own.weights, values.expand_as(own.directions), own.ridge)
    )


def zero_weights(pool):
    weights = pool.objective.weights.clone()
    weights[:, ::2] = 0.0
    return dataclasses.replace(pool, objective=dataclasses.replace(pool.objective, weights=weights))


def silent(pool):
    """Nothing responds and nothing weighs: all subsets tie in every capacity."""
    own = pool.objective
    return dataclasses.replace(
        pool, covariance=pool.covariance * 0, objective=Objective(own.weights * 0, own.directions, own.ridge)
    )


def diagonal_and_compressed(pool):
    """A diagonal covariance with a hole in it, directions of fewer channels than the values."""
    covariance = torch.diag_embed(pool.covariance.diagonal(dim1=1, dim2=2))
    covariance[:, 0, 0] = 0.0
    own = pool.objective
    narrow = Objective(own.weights, own.directions[..., :2] * torch.tensor([1.0, 2.0], dtype=F64), own.ridge)
    return dataclasses.replace(pool, covariance=covariance, objective=narrow)


CASES = {
    "plain": (make_pool(7, 3), 3),
    "sink": (make_pool(7, 3, sink=True), 3),
    "softcap": (make_pool(7, 4, softcap=1.5), 4),
    "softcap-sink-group": (make_pool(6, 3, group=3, softcap=2.0, sink=True), 3),
    "one-head": (make_pool(8, 2, group=1, steps=3), 2),
    "one-query": (make_pool(6, 3, steps=1, sink=True), 3),
    "wide-values": (make_pool(6, 4, dim=2, value_dim=9), 4),
    "wide-keys": (make_pool(6, 4, dim=11, value_dim=1), 4),
    "nine": (make_pool(9, 5, steps=3, sink=True), 5),
    "hot": (make_pool(8, 4, heat=6.0), 4),
    "duplicates": (duplicated(make_pool(8, 3)), 3),
    "duplicates-sink": (duplicated(make_pool(7, 4, sink=True, softcap=3.0)), 4),
    "dominant": (one_dominant(make_pool(7, 3)), 3),
    "collinear": (collinear(make_pool(7, 3)), 3),
    "collinear-sink": (collinear(make_pool(6, 3, sink=True)), 3),
    "zero-weights": (zero_weights(make_pool(7, 3)), 3),
    "silent": (silent(make_pool(6, 3)), 3),
    "narrow": (diagonal_and_compressed(make_pool(7, 3, sink=True)), 3),
    "keep-one": (make_pool(7, 1, sink=True), 1),
    "keep-one-no-sink": (make_pool(7, 1), 1),
    "keep-all": (make_pool(5, 5, sink=True), 5),
    "keep-all-but-one": (make_pool(7, 6), 6),
    "single": (make_pool(1, 1, sink=True), 1),
    "two": (make_pool(2, 1), 1),
}
SIGMA2 = torch.tensor([0.05, 0.4, 1.0], dtype=F64)


@pytest.mark.parametrize("small_tiles", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_every_rung_is_what_the_loop_over_all_subsets_finds(case, small_tiles, monkeypatch):
    if small_tiles:
        monkeypatch.setattr(split_masks, "TILE_NUMBERS", 12)
        monkeypatch.setattr(damage, "EVALUATED_NUMBERS", 40)
        monkeypatch.setattr(damage, "CHUNK", 3)
        monkeypatch.setattr(capacity, "TILE_NUMBERS", 300)
        monkeypatch.setattr(local_fit, "BLOCK_SETS", 4)
        monkeypatch.setattr(local_fit, "EVALUATED_NUMBERS", 100)
    pool, keep = CASES[case]
    sigma2 = SIGMA2[: pool.heads]
    dumb, found = Dumb(pool, sigma2), study(pool, keep, sigma2)
    energy = sum(float(f.square().sum()) for head in dumb.full for f in head)
    assert found.values["output_energy"] == pytest.approx(energy, rel=1e-12)
    expected = {
        "diag": dumb.best(lambda kept: -dumb.own(kept), keep, 1.0),
        "full": dumb.best(lambda kept: -dumb.capacity(kept, True), keep, 1.0),
        "ren": dumb.best(lambda kept: -dumb.capacity(kept, False), keep, 1.0),
        "lin": dumb.best(dumb.misfit, keep, energy),
        "best": dumb.best(dumb.damage, keep, 1e-10 * energy),
    }
    for rung, (kept, _) in expected.items():
        assert found.sets[rung].sort().values.tolist() == kept, rung
    tolerance = 1e-12 * max(1.0, energy)
    cost = {rung: dumb.damage(sorted(found.sets[rung].tolist())) for rung in RUNGS}
    for rung in RUNGS:
        assert found.values[f"damage_{rung}"] == pytest.approx(cost[rung], abs=tolerance)
    assert found.values["capacity_best"] == pytest.approx(-expected["diag"][1], abs=1e-12)
    for name, kept in (("one_shot", "one"), ("two_pass", "capacity_two_pass"), ("greedy", "capacity_greedy")):
        gap = -expected["diag"][1] - dumb.own(sorted(found.sets[kept].tolist()))
        assert found.values[f"capacity_gap_{name}"] == pytest.approx(gap, abs=1e-12)
        assert found.values[f"capacity_gap_{name}"] >= 0
    for name in ("two_pass", "greedy", "capacity_two_pass", "capacity_greedy"):
        gap = dumb.damage(sorted(found.sets[name].tolist())) - cost["best"]
        assert found.values[f"damage_gap_{name}"] == pytest.approx(gap, abs=tolerance)
        assert found.values[f"damage_gap_{name}"] >= 0
    assert found.values["damage_gap_one_shot"] == found.values["ladder_total"]
    assert found.values["damage_gap_capacity_exhaustive"] == pytest.approx(cost["diag"] - cost["best"], abs=tolerance)


@pytest.mark.parametrize("case", CASES)
def test_the_ladder_adds_up(case):
    pool, keep = CASES[case]
    values = study(pool, keep, SIGMA2[: pool.heads]).values
    assert list(values) == list(COLUMNS)
    steps = [values[f"ladder_{step}"] for step in STEPS]
    for step, here, below in zip(steps, RUNGS, RUNGS[1:], strict=False):
        assert step == values[f"damage_{here}"] - values[f"damage_{below}"]
    largest = max(values[f"damage_{rung}"] for rung in RUNGS)
    assert math.fsum(steps) == pytest.approx(values["ladder_total"], abs=8 * 2.3e-16 * largest)
    assert values["ladder_total"] >= 0
    assert values["ladder_linearity"] >= 0


def test_keeping_everything_does_no_damage_at_all():
    values = study(*CASES["keep-all"], SIGMA2[:2]).values
    assert [values[f"damage_{rung}"] for rung in RUNGS] == [0.0] * 6
    assert values["capacity_gap_one_shot"] == 0.0


def test_a_policy_without_an_objective_has_only_the_ends():
    pool = dataclasses.replace(make_pool(7, 3), objective=None)
    found = study(pool, 3, SIGMA2[:2])
    defined = {name for name, value in found.values.items() if value is not None}
    ends = {"damage_one", "damage_best", "ladder_total", "output_energy"}
    assert defined == ends | {f"damage_gap_{name}" for name in ("one_shot", "two_pass", "greedy")}
    assert set(found.sets) == {"one", "best", "two_pass", "greedy"}
    whole = study(make_pool(7, 3), 3, SIGMA2[:2])
    assert {name: whole.values[name] for name in defined} == {name: found.values[name] for name in defined}


def test_a_noise_of_nothing_leaves_its_two_rungs_undefined():
    found = study(make_pool(7, 3), 3, torch.tensor([0.0, 1.0], dtype=F64))
    assert {"diag", "lin", "best"} <= set(found.sets)
    assert not {"full", "ren"} & set(found.sets)
    missing = {name for name, value in found.values.items() if value is None}
    steps = {"ladder_diagonal", "ladder_renormalisation", "ladder_information"}
    assert missing == {"damage_full", "damage_ren"} | steps


def test_shared_damages_change_nothing_and_are_not_mixed_up():
    first, second = make_pool(8, 4), make_pool(8, 4)
    second = dataclasses.replace(second, mean=-second.mean, covariance=second.covariance * 3)
    shared = damages(first, 4)
    for pool, noise in ((first, 0.1), (second, 0.1), (first, 5.0), (first, 0.1)):
        sigma2 = torch.full((2,), noise, dtype=F64)
        alone, together = study(pool, 4, sigma2), study(pool, 4, sigma2, shared)
        assert alone.values == together.values
        assert {k: v.tolist() for k, v in alone.sets.items()} == {k: v.tolist() for k, v in together.sets.items()}
    with pytest.raises(KvtoolError, match="given for another"):
        study(make_pool(8, 3), 3, SIGMA2[:2], shared)


def test_given_pool_weights_are_the_ones_of_the_full_rung():
    pool = make_pool(8, 3, sink=True)
    tilted = torch.softmax(torch.arange(16.0, dtype=F64).view(2, 8), 1) * 0.9
    plain = study(pool, 3, SIGMA2[:2])
    given = study(dataclasses.replace(pool, pool_weights=tilted), 3, SIGMA2[:2])
    dumb = Dumb(pool, SIGMA2[:2])
    dumb.attention = lambda h, q, kept: [float(tilted[h, i]) for i in kept]
    assert given.sets["full"].sort().values.tolist() == dumb.best(lambda k: -dumb.capacity(k, True), 3, 1.0)[0]
    assert given.sets["full"].tolist() != plain.sets["full"].tolist()
    assert given.sets["ren"].tolist() == plain.sets["ren"].tolist()


def test_what_does_not_fit_is_refused():
    pool = make_pool(7, 3)
    for kept in ([0, 1], [0, 1, 1]):
        with pytest.raises(KvtoolError, match="3 different tokens"):
            study(dataclasses.replace(pool, one_shot=torch.tensor(kept)), 3, SIGMA2[:2])
    with pytest.raises(KvtoolError, match="cannot keep 8 of a sub-pool of 7"):
        damages(pool, 8)
    with pytest.raises(KvtoolError, match="ascend"):
        dataclasses.replace(pool, rows=pool.rows.flip(0))
    with pytest.raises(KvtoolError, match="covariance"):
        dataclasses.replace(pool, covariance=pool.covariance[:, :-1])


def test_a_best_that_is_beaten_is_a_fault():
    pool = make_pool(7, 3)
    shared = damages(pool, 3)
    shared.best = Best(shared.best.number, shared.best.value * 1e6, 0.0)
    with pytest.raises(KvtoolError, match="beaten") as caught:
        study(pool, 3, SIGMA2[:2], shared)
    assert caught.value.code == "internal"


def with_values(**given):
    return Study({**dict.fromkeys(COLUMNS), **given}, {})


def test_mean_and_interval_over_sub_pools_by_hand():
    studies = [with_values(damage_one=value, ladder_total=2.0) for value in (1.0, 2.0, 6.0)]
    summary = summarize(studies)
    t = 0.95 * math.sqrt(2 / (1 - 0.95**2))  # of 2 degrees of freedom
    half = t * math.sqrt(7.0) / math.sqrt(3.0)  # variance (4 + 1 + 9) / 2
    assert summary["damage_one"] == pytest.approx(3.0, rel=1e-15)
    assert summary["damage_one_low"] == pytest.approx(3.0 - half, rel=1e-12)
    assert summary["damage_one_high"] == pytest.approx(3.0 + half, rel=1e-12)
    assert (summary["ladder_total_low"], summary["ladder_total_high"]) == (2.0, 2.0)
    assert summary["damage_full"] is None
    assert summary["damage_full_low"] is None
    assert summary["undefined_samples"] == 0
    assert len(summary) == 3 * len(COLUMNS) + 1


def test_one_sub_pool_has_no_interval_and_none_has_no_mean():
    summary = summarize([with_values(damage_one=4.0)])
    assert (summary["damage_one"], summary["damage_one_low"], summary["damage_one_high"]) == (4.0, None, None)
    nothing = summarize([])
    assert nothing.pop("undefined_samples") == 0
    assert set(nothing.values()) == {None}


def test_a_sub_pool_without_an_objective_is_left_out_of_the_whole_line_and_counted():
    """Else means of steps would speak of other sub-pools than the mean of the total, and not add up."""
    studies = [study(make_pool(7, 3, seed=seed), 3, SIGMA2[:2]) for seed in range(4)]
    blind = dict(studies[2].values)
    blind |= dict.fromkeys(("damage_diag", "ladder_selection", "ladder_diagonal"))
    blind["ladder_total"] = 1e6
    summary = summarize([*studies[:2], Study(blind, {}), studies[3]])
    assert summary["undefined_samples"] == 1
    assert summary == {**summarize([*studies[:2], studies[3]]), "undefined_samples": 1}
    total = math.fsum(summary[f"ladder_{step}"] for step in STEPS)
    assert total == pytest.approx(summary["ladder_total"], rel=1e-12)


def test_means_add_up_as_each_sub_pool_does():
    studies = [study(make_pool(7, 3, seed=seed), 3, SIGMA2[:2]) for seed in range(5)]
    summary = summarize(studies)
    total = math.fsum(summary[f"ladder_{step}"] for step in STEPS)
    assert total == pytest.approx(summary["ladder_total"], rel=1e-12)
    assert len({tuple(each.sets["best"].tolist()) for each in studies}) > 1
