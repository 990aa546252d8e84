"""The moving average as a running state against its definition, and a mixture of which one kind is expected."""

import dataclasses

import pytest
import torch

from kvtool.layer import Layer
from kvtool.policies import policy_from_text
from kvtool.policies.moving_statistics import BLOCK, MovingStatistics
from kvtool.policies.query_statistics import moving_average, past_statistics
from kvtool.testing import example_layer, scores_at
from kvtool.view import View

RUNS = {"at once": (), "one by one": range(1, 60), "oddly": (2, 3, 4, 5, 6, 31), "a late start": (40,)}


def policy(text):
    return policy_from_text(text)[1]


def observed(state, layer, stops, step, move):
    start = 0
    for stop in [s for s in stops if s < step] + [step]:
        state, start = move(state, dataclasses.replace(View.at(layer, stop), start=start)), stop
    return state


@pytest.mark.parametrize("runs", RUNS)
@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize(("beta", "exclude"), [(0.3, 4), (0.99, 4), (0.999999, 0), (0.9, 30), (0.9, 70)])
def test_the_state_equals_the_definition(beta, exclude, full, runs):
    layer = example_layer(
        60, dtype=torch.float64, mean_query=50.0
    )  # far from zero: differences of moments would cancel
    for step in (1, 2, 5, 6, 32, 59):
        state = MovingStatistics.nothing(layer.geometry, beta, exclude, full)
        found = observed(state, layer, RUNS[runs], step, MovingStatistics.extended).statistics(1e-6)
        expected = moving_average(View.at(layer, step), beta, exclude)
        expected = expected if full else expected.diagonal_only()
        assert float((found.mean - expected.mean).abs().max()) <= 1e-12 * float(expected.mean.abs().max())
        assert float((found.covariance - expected.covariance).abs().max()) <= 1e-12 * max(
            1.0, float(expected.covariance.abs().max())
        )
        assert state.stop == 0  # the state that was extended stays what it was


def test_long_runs_are_cut_into_blocks():
    count = 2 * BLOCK + 77
    queries = torch.randn(1, count + 1, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 9
    layer = Layer.from_arrays(queries, queries, queries, prompt_length=count, scale=1.0, dtype=torch.float64)
    view = dataclasses.replace(View.at(layer, count), start=0)
    found = MovingStatistics.nothing(layer.geometry, 0.9999, 4, True).extended(view).statistics(0.0)
    expected = moving_average(view, 0.9999, 4, 0.0)
    assert float((found.mean - expected.mean).abs().max()) < 1e-12
    assert float((found.covariance - expected.covariance).abs().max()) < 1e-12


@pytest.mark.parametrize("response", ["diagonal", "full", "none"])
@pytest.mark.parametrize("runs", RUNS)
def test_scores_with_the_state_are_those_without(response, runs):
    layer = example_layer(60, dtype=torch.float64, seed=2)
    chosen = policy(f"capacity:tau=1,statistics=ema:0.9,response={response}")
    alone = chosen.score(None, View.at(layer, 50))
    state = observed(chosen.start(layer.geometry), layer, RUNS[runs], 50, chosen.observe)
    found = chosen.score(state, View.at(layer, 50))
    assert float((found - alone).abs().max()) <= 1e-12 * float(alone.abs().max())
    blended = policy(f"capacity:tau=1,statistics=ema:0.9,response={response},blend=0.5")
    both = blended.observe(blended.start(layer.geometry), View.at(layer, 50).past())
    assert both.history is not None
    assert torch.equal(
        both.moving.mean, chosen.observe(chosen.start(layer.geometry), View.at(layer, 50).past()).moving.mean
    )


def test_a_state_is_of_one_sequence():
    first, second = (example_layer(60, dtype=torch.float64, seed=s) for s in (3, 4))
    chosen = policy("capacity:statistics=ema")
    empty = chosen.start(first.geometry)
    chosen.observe(empty, View.at(first, 50).past())
    after = chosen.score(chosen.observe(empty, View.at(second, 50).past()), View.at(second, 50))
    assert torch.equal(after, scores_at(chosen, second, 50))


def test_the_floor_is_a_parameter():
    layer = example_layer(26, dtype=torch.float64)
    layer.queries[:, 4:] = 2.0
    chosen = policy("capacity:statistics=ema:0.5,variance_floor=0.25")
    assert torch.equal(
        chosen.query_statistics(View.at(layer, 20)).variance, torch.full((4, 8), 0.25, dtype=torch.float64)
    )
    state = chosen.observe(chosen.start(layer.geometry), View.at(layer, 20).past())
    assert torch.equal(state.moving.statistics(0.25).variance, torch.full((4, 8), 0.25, dtype=torch.float64))


def two_phases(newest):
    """Queries that plan (towards channel 0) up to row 30, and verify (towards channel 1) from there on; the last one
    before row 50 as `newest` says."""
    layer = example_layer(60, dtype=torch.float64, rotation="none", seed=6)
    layer.queries[:, :30, 0] += 20.0
    layer.queries[:, 30:, 1] += 20.0
    if newest == "planning":
        layer.queries[:, 49] = layer.queries[:, 10]
    return layer


@pytest.mark.parametrize("newest", ["planning", "verifying"])
def test_only_the_kind_of_the_newest_query_is_expected(newest):
    layer = two_phases(newest)
    view = View.at(layer, 50)
    chosen = policy("capacity:tau=1,statistics=mixture:2,mixture_combine=assigned")
    own = [*range(4, 30), 49] if newest == "planning" else list(range(30, 50))
    queries = layer.queries[:, own]
    found = chosen.query_statistics(view)
    assert torch.allclose(found.mean, queries.mean(1), rtol=1e-12, atol=1e-12)
    assert torch.allclose(found.variance, queries.var(1, correction=0), rtol=1e-10, atol=1e-12)
    by_hand = []
    for head in range(4):
        keys, values = layer.keys[head // 2, :50], layer.values[head // 2, :50]
        attention = torch.softmax(0.4 * keys @ queries[head].mean(0), 0)
        spread = keys.square() @ queries[head].var(0, correction=0)
        weights = 0.16 * (attention * (1 - attention)).square() * spread
        gram = torch.eye(6, dtype=torch.float64) + values.T @ (weights[:, None] * values)
        by_hand.append(weights * ((values @ torch.linalg.inv(gram)) * values).sum(1))
    expected = torch.stack(by_hand).view(2, 2, 50).mean(1)
    scores = {
        c: scores_at(policy(f"capacity:tau=1,statistics=mixture:2,mixture_combine={c}"), layer, 50)
        for c in ("assigned", "mean", "worst")
    }
    assert torch.allclose(scores["assigned"], expected, rtol=1e-10, atol=1e-15)
    assert not any(torch.allclose(scores["assigned"], scores[c], rtol=1e-3) for c in ("mean", "worst"))


def test_one_kind_alone_is_assigned_to_itself():
    layer = example_layer(60, dtype=torch.float64)
    found = scores_at(policy("capacity:statistics=mixture:1,mixture_combine=assigned"), layer, 50)
    assert torch.equal(found, scores_at(policy("capacity:statistics=mixture:1"), layer, 50))


def test_policies_share_the_statistics_of_past_queries_that_they_read_alike():
    layer = example_layer()
    shared = {}
    mine, other = (dataclasses.replace(View.at(layer, 40), shared=shared) for _ in range(2))
    for source, exclude in (("rope_mean", 4), ("prompt", 4), ("rope_mean", 2)):
        found = past_statistics(mine, source, exclude)
        assert past_statistics(other, source, exclude) is found
        alone = past_statistics(View.at(layer, 40), source, exclude)
        assert torch.equal(found.mean, alone.mean)
        assert torch.equal(found.covariance, alone.covariance)
    assert len(shared) == 3
