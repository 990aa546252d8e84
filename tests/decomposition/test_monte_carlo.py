"""Monte-Carlo capacity: against a closed form, against quadrature, and inside its bounds."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtool.decomposition.covariance_space import capacities, output_root
from kvtool.decomposition.monte_carlo import Draws, Information
from kvtool.decomposition.monte_carlo import mutual_information as at_noises

torch.set_num_threads(1)


def draws(queries, width, count=10_000, seed=0):
    return Draws.from_stream(np.random.default_rng(seed), count, queries, width)


def mutual_information(outputs, sigma2, drawn, most) -> Information:
    """At one noise, and the same beside another one."""
    (alone,) = at_noises(outputs, [sigma2], drawn, [most])
    assert at_noises(outputs, [3.0, sigma2], drawn, [most, most])[1] == alone
    return alone


def gauss(outputs, sigma2):
    noises = torch.tensor([[sigma2]], dtype=torch.float64)
    return float(capacities(output_root(outputs[None]), noises)[0, 0])


@pytest.mark.parametrize("strength", [0.3, 1.0, 3.0])
def test_a_linear_map_of_gaussian_queries_has_the_closed_form(strength):
    """Where f_C is linear, f_C(q) is Gaussian and its information is 1/2 logdet(I + J Lambda J^T / sigma^2)."""
    count = 4000
    even = torch.linspace(0.5 / count, 1 - 0.5 / count, count, dtype=torch.float64)
    queries = torch.special.ndtri(even)[:, None]  # quantiles: a normal sample without its own noise
    matrix = strength * torch.tensor([[0.6], [0.8], [0.0]], dtype=torch.float64)
    outputs = queries @ matrix.T
    found = mutual_information(outputs, 1.0, draws(count, 3), math.inf)
    closed = 0.5 * math.log1p(strength**2)
    assert abs(found.nats - closed) <= 4 * found.standard_error + 2e-3
    assert 0 < found.standard_error < 0.02
    assert not found.saturated


def test_two_points_equal_quadrature():
    outputs = torch.tensor([[-1.2], [1.2]], dtype=torch.float64)
    y = np.linspace(-12, 12, 200_001)
    density = sum(np.exp(-((y - m) ** 2) / 2) / math.sqrt(2 * math.pi) for m in (-1.2, 1.2)) / 2
    entropy = -np.trapezoid(density * np.log(density), y)
    expected = entropy - 0.5 * math.log(2 * math.pi * math.e)
    found = mutual_information(outputs, 1.0, draws(2, 1), math.inf)
    assert abs(found.nats - expected) <= 4 * found.standard_error
    assert found.standard_error < 0.01


def test_noise_far_below_the_distances_saturates():
    outputs = torch.randn(20, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = mutual_information(outputs, 1e-8, draws(20, 4), gauss(outputs, 1e-8))
    assert found.nats == pytest.approx(math.log(20), abs=1e-9)
    assert found.saturated
    half = mutual_information(outputs, 1.0, draws(20, 4), gauss(outputs, 1.0))
    assert not half.saturated


def test_one_query_tells_nothing():
    found = mutual_information(torch.ones(1, 3, dtype=torch.float64), 1.0, draws(1, 3), 0.0)
    assert (found.nats, found.standard_error, found.saturated) == (0.0, 0.0, False)


def test_a_shift_far_away_changes_nothing():
    outputs = torch.randn(30, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    here = mutual_information(outputs, 0.5, draws(30, 3), gauss(outputs, 0.5))
    there = mutual_information(outputs + 1e4, 0.5, draws(30, 3), gauss(outputs, 0.5))
    assert there.nats == pytest.approx(here.nats, abs=1e-6)


@given(
    count=st.integers(2, 40),
    width=st.integers(1, 6),
    size=st.floats(1e-4, 1e3),
    sigma2=st.sampled_from([1.0, 1e-3, 50.0]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40, deadline=None)
def test_never_outside_what_is_possible(count, width, size, sigma2, seed):
    g = torch.Generator().manual_seed(seed)
    outputs = size * torch.randn(count, width, generator=g, dtype=torch.float64)
    most = gauss(outputs, sigma2)
    found = mutual_information(outputs, sigma2, draws(count, width, 500, seed), most)
    assert 0 <= found.nats <= min(math.log(count), most)
    assert math.isfinite(found.standard_error)
    assert found.saturated == (found.nats > 0.9 * math.log(count))
