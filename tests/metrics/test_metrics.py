"""The metrics' formulas, what is undefined, and what the identities of the case list say."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from kvtool.layer import Geometry, Layer
from kvtool.metrics import (
    StepErrors,
    built_in_metrics,
    columns,
    evaluate_layer,
    mass_regret,
    mean_over_sequences,
    nullable,
)
from kvtool.retained import Event, RetainedSet

torch.set_num_threads(1)

GEOMETRY = Geometry(layer=0, query_heads=4, kv_heads=2, key_dim=8, value_dim=8, scale=1.0)
ALL = RetainedSet.keep_all(2, 20)


def make_errors(heads: int = 4, count: int = 11, seed: int = 0, layer: bool = True) -> StepErrors:
    g = torch.Generator().manual_seed(seed)

    def positive(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=g, dtype=torch.float64) + 0.1

    per_head = [positive(heads, count) for _ in range(5)]
    per_layer = [positive(count), positive(count)] if layer else [None, None]
    return StepErrors(torch.arange(9, 9 + count), *per_head, *per_layer)


def partial(
    name: str, errors: StepErrors, retained: RetainedSet = ALL, geometry: Geometry = GEOMETRY
) -> dict[str, Tensor]:
    return built_in_metrics()[name].partial(errors, geometry, retained)


def test_output_error_and_its_quantiles() -> None:
    errors = make_errors()
    found = partial("output_error", errors)
    for h in range(4):
        e2, f2 = errors.squared_error[h].tolist(), errors.squared_output[h].tolist()
        assert float(found["output_error"][h]) == pytest.approx(math.sqrt(math.fsum(e2) / math.fsum(f2)), rel=1e-14)
        steps = [math.sqrt(e / f) for e, f in zip(e2, f2, strict=True)]
        for suffix, share in (("p50", 50), ("p95", 95), ("p99", 99), ("max", 100)):
            assert float(found[f"output_error_{suffix}"][h]) == pytest.approx(np.percentile(steps, share), rel=1e-14)
    assert found["undefined_steps"].tolist() == [0, 0, 0, 0]


def test_steps_without_output_are_left_out_of_quantiles_and_counted() -> None:
    errors = make_errors()
    errors.squared_output[1, [2, 5]] = 0.0
    errors.squared_output[2] = 0.0
    errors.squared_error[2] = 0.0
    found = partial("output_error", errors)
    assert found["undefined_steps"].tolist() == [0, 2, 11, 0]
    rest = [j for j in range(11) if j not in (2, 5)]
    steps = (errors.squared_error[1, rest] / errors.squared_output[1, rest]).sqrt().numpy()
    assert float(found["output_error_p95"][1]) == pytest.approx(np.percentile(steps, 95), rel=1e-14)
    assert nullable(found["output_error"])[2] is None
    assert nullable(found["output_error_max"])[2] is None
    cell = built_in_metrics()["output_error"].combine([found])
    assert cell["undefined_heads"] == 1
    assert cell["mean_output_error"] == pytest.approx(float(found["output_error"][[0, 1, 3]].mean()), rel=1e-14)


def test_layer_error_and_the_means_over_layers() -> None:
    layers = [make_errors(seed=s) for s in range(3)]
    found = [partial("layer_error", errors) for errors in layers]
    expected = []
    for errors in layers:
        assert errors.layer_squared_error is not None
        assert errors.layer_squared_output is not None
        expected.append(math.sqrt(float(errors.layer_squared_error.sum()) / float(errors.layer_squared_output.sum())))
    assert [float(p["layer_error"]) for p in found] == pytest.approx(expected, rel=1e-14)
    cell = built_in_metrics()["layer_error"].combine(found)
    assert cell["mean_layer_error"] == pytest.approx(sum(expected) / 3, rel=1e-14)
    assert cell["undefined_layers"] == 0


def test_layer_error_is_undefined_without_a_projection() -> None:
    metric = built_in_metrics()["layer_error"]
    found = partial("layer_error", make_errors(layer=False))
    assert nullable(found["layer_error"]) == [None]
    assert metric.combine([found, found]) == {"mean_layer_error": None, "undefined_layers": 2}


def test_undefined_steps_of_cosine_and_gap_are_left_out_of_their_means() -> None:
    errors = make_errors()
    errors.gap[0, 3:] = float("nan")
    errors.gap[1] = float("nan")
    errors.cosine[2, :4] = float("nan")
    gap, cosine = (
        partial("direction_gap", errors)["direction_gap"],
        partial("cosine_distance", errors)["cosine_distance"],
    )
    assert float(gap[0]) == pytest.approx(float(errors.gap[0, :3].mean()), rel=1e-14)
    assert nullable(gap)[1] is None
    assert float(cosine[2]) == pytest.approx(float(errors.cosine[2, 4:].mean()), rel=1e-14)
    mass = partial("evicted_mass", errors)["evicted_mass"]
    torch.testing.assert_close(mass, errors.mass.mean(-1), rtol=1e-14, atol=0)


def test_heads_that_cancel_in_the_projection_have_no_layer_error() -> None:
    """Heads are summed before the norm: two heads that err alike and are subtracted leave nothing."""
    g = torch.Generator().manual_seed(0)
    query, keys, values = (torch.randn(1, n, 8, generator=g, dtype=torch.float64) for n in (6, 20, 20))
    projection = torch.randn(1, 8, 5, generator=g, dtype=torch.float64)
    layer = Layer.from_arrays(
        query.repeat(2, 1, 1),
        keys,
        values,
        prompt_length=14,
        scale=0.3,
        output_projection=torch.cat([projection, -projection * 0.5]),
        dtype=torch.float64,
    )
    evict = torch.full((1, 20), 20, dtype=torch.int32)
    evict[0, 3:12] = 14
    (errors,) = evaluate_layer(layer, [RetainedSet(evict)], torch.arange(14, 20))
    assert errors.layer_squared_error is not None
    (alone,) = evaluate_layer(
        Layer.from_arrays(
            query, keys, values, prompt_length=14, scale=0.3, output_projection=projection * 0.5, dtype=torch.float64
        ),
        [RetainedSet(evict)],
        torch.arange(14, 20),
    )
    torch.testing.assert_close(errors.layer_squared_error, alone.layer_squared_error, rtol=1e-12, atol=0)


def test_cosine_is_blind_to_a_halved_output_and_one_ruined_head_hides_in_a_mean() -> None:
    """An evicted twin with the opposite value halves nothing in direction: only the length tells."""
    keys = torch.zeros(1, 4, 8, dtype=torch.float64)
    values = torch.zeros(1, 4, 8, dtype=torch.float64)
    values[0, 0, 0], values[0, 1, 0] = 3.0, 1.0
    layer = Layer.from_arrays(torch.zeros(1, 1, 8), keys, values, prompt_length=3, scale=1.0, dtype=torch.float64)
    evict = torch.tensor([[3, 4, 4, 4]], dtype=torch.int32)
    (errors,) = evaluate_layer(layer, [RetainedSet(evict)], torch.tensor([3]))
    geometry = layer.geometry
    assert float(partial("cosine_distance", errors, geometry=geometry)["cosine_distance"][0]) == 0.0
    assert float(partial("output_error", errors, geometry=geometry)["output_error"][0]) == pytest.approx(
        2 / 3, rel=1e-14
    )
    heads = torch.zeros(32, dtype=torch.float64)
    heads[5] = 1.0
    assert float(heads.mean()) < 0.04  # why tables show the worst head too
    assert {"output_error", "output_error_max"} <= {c.name for c in columns() if c.level == "head"}


def brute_regret(order: list[int], mass: list[float]) -> float:
    """Evicted mass summed over budgets 1..n, tokens of `order` kept first."""
    return math.fsum(math.fsum(mass[i] for i in order[budget:]) for budget in range(1, len(order) + 1))


def test_mass_regret_is_evicted_mass_over_all_budgets_and_nobody_is_below_one() -> None:
    mass = [0.5, 0.125, 2.0, 0.0, 0.25]
    best = min(brute_regret(list(p), mass) for p in itertools.permutations(range(5)))
    for order in itertools.permutations(range(5)):
        ranks = torch.empty(5, dtype=torch.int64)
        ranks[list(order)] = torch.arange(1, 6)
        (found,) = mass_regret(ranks[None], torch.tensor([mass]))
        assert found is not None
        assert found >= 1.0
        assert found == pytest.approx(brute_regret(list(order), mass) / best, rel=1e-13)


def test_the_oracle_has_a_regret_of_exactly_one_with_ties_too() -> None:
    g = torch.Generator().manual_seed(4)
    for dtype in (torch.float32, torch.float64):
        mass = torch.rand(7, 411, generator=g, dtype=torch.float64).to(dtype)
        mass[:, ::3] = mass[:, :1]  # ties: any order among equals is the oracle's
        order = mass.flip(1).argsort(dim=1, descending=True, stable=True)
        order = 410 - order
        ranks = torch.empty_like(order).scatter_(1, order, torch.arange(1, 412).expand_as(order))
        assert mass_regret(ranks, mass) == [1.0] * 7
        nearly = ranks.clone()
        nearly[:, order[0, 0]], nearly[:, order[0, 1]] = ranks[:, order[0, 1]], ranks[:, order[0, 0]]
        assert all(r is not None and r >= 1.0 for r in mass_regret(nearly, mass))


def test_mass_regret_without_a_least_loss() -> None:
    ranks = torch.tensor([[1, 2, 3], [1, 2, 3], [2, 1, 3], [1, 2, 3]])
    mass = torch.tensor([[0.0, 0.0, 0.0], [0.7, 0.0, 0.0], [0.7, 0.0, 0.0], [0.3, 0.3, 0.3]])
    assert mass_regret(ranks, mass) == [1.0, 1.0, None, 1.0]
    assert mass_regret(torch.zeros(1, 0, dtype=torch.int64), torch.zeros(1, 0)) == [1.0]


def make_event(ranking: Tensor | None, candidates: Tensor) -> Event:
    none = torch.zeros(2)
    return Event(15, candidates, *[none] * 6, sinks=2, window=3, ranking=ranking)


def test_mass_regret_looks_at_unprotected_candidates_only() -> None:
    g = torch.Generator().manual_seed(8)
    errors = make_errors()
    mass = torch.rand(2, 20, generator=g, dtype=torch.float64)
    mass[:, :2], mass[:, 12:15] = 100.0, 100.0  # protected: would drown everything else
    candidates = torch.arange(1, 15)  # row 0 has left the window
    ranking = torch.stack([torch.randperm(14, generator=g) + 1 for _ in range(2)])
    retained = RetainedSet(ALL.evict_step, [make_event(ranking, candidates)])
    with_mass = StepErrors(**{**vars(errors), "future_mass": mass})
    found = partial("mass_regret", with_mass, retained)["mass_regret"].tolist()
    expected = []
    for h in range(2):
        free = [i for i in range(14) if 2 <= int(candidates[i]) < 12]
        order = sorted(range(10), key=lambda j, h=h, free=free: int(ranking[h, free[j]]))
        masses = [float(mass[h, candidates[i]]) for i in free]
        best = sorted(range(10), key=lambda j, m=masses: -m[j])
        expected.append(brute_regret(order, masses) / brute_regret(best, masses))
    assert found == pytest.approx([expected[0], expected[0], expected[1], expected[1]], rel=1e-13)
    assert found[0] > 1.0


@pytest.mark.parametrize("why", ["several events", "not nested", "no future mass"])
def test_mass_regret_is_null_where_it_means_nothing(why: str) -> None:
    ranking = torch.arange(1, 16).expand(2, -1)
    event = make_event(None if why == "not nested" else ranking, torch.arange(15))
    events = [event, event] if why == "several events" else [event]
    errors = StepErrors(
        **{**vars(make_errors()), "future_mass": None if why == "no future mass" else torch.rand(2, 20)}
    )
    found = partial("mass_regret", errors, RetainedSet(ALL.evict_step, events))
    assert nullable(found["mass_regret"]) == [None] * 4


def test_every_column_is_filled_by_the_metric_that_names_it_and_by_no_other() -> None:
    errors = make_errors()
    seen: list[tuple[str, str]] = []
    for metric in built_in_metrics().values():
        stored = metric.partial(errors, GEOMETRY, ALL)
        handed_out = metric.combine([stored, stored])
        for column in metric.columns:
            seen.append((column.level, column.name))
            if column.level == "cell":
                assert column.name in handed_out
            elif column.share:
                assert [heads.numel() for heads in metric.shares([stored, stored])[column.name]] == [4, 4]
            else:
                assert stored[column.name].numel() == (4 if column.level == "head" else 1), column.name
        assert set(handed_out) == {c.name for c in metric.columns if c.level == "cell"}
    assert len(seen) == len(set(seen))
    assert seen == [(column.level, column.name) for column in columns()]


def test_nothing_handed_out_is_nan() -> None:
    assert nullable(torch.tensor([1.5, float("nan")], dtype=torch.float64)) == [1.5, None]
    assert nullable(torch.tensor([3, 4])) == [3, 4]
    assert mean_over_sequences([{"a": 1.0, "b": None}, {"a": 2.0, "b": 4.0}, {"a": None, "b": None}]) == {
        "a": 1.5,
        "b": 4.0,
    }
    assert mean_over_sequences([{"a": None}]) == {"a": None}


def test_a_sink_token_that_holds_the_attention_shows_in_the_error_and_protecting_it_removes_it() -> None:
    """60 % of the attention on a first token of almost no value: evicting it more than doubles the output."""
    g = torch.Generator().manual_seed(1)
    keys = 0.01 * torch.randn(1, 40, 8, generator=g, dtype=torch.float64)
    values = torch.randn(1, 40, 8, generator=g, dtype=torch.float64) + 3.0
    keys[0, 0, 0] = math.log(1.5 * 31)
    values[0, 0] *= 1e-3
    queries = torch.zeros(1, 8, 8, dtype=torch.float64)
    queries[..., 0] = 1.0
    layer = Layer.from_arrays(queries, keys, values, prompt_length=32, scale=1.0, dtype=torch.float64)
    recent = torch.full((1, 40), 40, dtype=torch.int32)
    recent[0, :16] = 32
    with_sink = recent.clone()
    with_sink[0, 0] = 40
    bad, good = (
        float(partial("output_error", errors, geometry=layer.geometry)["output_error"][0])
        for errors in evaluate_layer(layer, [RetainedSet(recent), RetainedSet(with_sink)], torch.arange(32, 40))
    )
    assert bad > 1.0
    assert good < 0.35


def test_ranks_with_gaps_say_no_more_than_their_order() -> None:
    mass = torch.tensor([[0.5, 0.125, 2.0, 1.0]])
    packed, spread = torch.tensor([[2, 4, 3, 1]]), torch.tensor([[5, 90, 7, 2]])
    assert mass_regret(spread, mass) == mass_regret(packed, mass) == mass_regret(packed + 60, mass)
    lost, least = 0.5 + 2 * 2.0 + 3 * 0.125, 1.0 + 2 * 0.5 + 3 * 0.125
    assert mass_regret(spread, mass) == [lost / least]


def test_one_ranking_is_judged_anew_by_another_mass_or_protection() -> None:
    rows, ranking = torch.arange(12), torch.stack([torch.arange(12, 0, -1), torch.arange(1, 13)])
    nothing, undefined = torch.zeros(2, dtype=torch.int64), torch.full((2,), math.nan, dtype=torch.float64)

    def of(mass: Tensor, sinks: int, order: Tensor) -> list[float]:
        event = Event(12, rows, nothing + 6, nothing + 6, nothing, undefined, undefined, [], sinks, 0, ranking=order)
        errors = dataclasses.replace(make_errors(), future_mass=mass)
        retained = RetainedSet(ALL.evict_step, [event])
        return partial("mass_regret", errors, retained)["mass_regret"].tolist()

    g = torch.Generator().manual_seed(1)
    first, second = (torch.rand(2, 20, generator=g, dtype=torch.float64) for _ in range(2))
    for mass, sinks in ((first, 0), (second, 0), (first, 3), (first, 0)):
        assert of(mass, sinks, ranking) == of(mass.clone(), sinks, ranking.clone())
    assert of(first, 0, ranking) != of(second, 0, ranking) != of(first, 3, ranking)
