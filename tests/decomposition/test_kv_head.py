"""KVHead: what the kept sets of one event share, and what they must not share."""

from __future__ import annotations

import math

import pytest
import torch

from kvtool.decomposition import Decompose, KVHead
from kvtool.decomposition.objective_capacity import objective_capacity
from kvtool.layer import Layer
from kvtool.policies.objective import Objective
from kvtool.view import View

STEP, COUNT, DIM, WIDTH = 20, 9, 5, 3


def head_of(loud: float = 1.0) -> KVHead:
    g = torch.Generator().manual_seed(0)
    layer = Layer.from_arrays(
        torch.randn(4, STEP + COUNT, DIM, generator=g),
        torch.randn(2, STEP + COUNT, DIM, generator=g),
        loud * torch.randn(2, STEP + COUNT, WIDTH, generator=g),
        prompt_length=STEP,
        scale=0.5,
        dtype=torch.float64,
    )
    return KVHead.of(layer, View.at(layer, STEP), 1, torch.arange(STEP, STEP + COUNT), Decompose())


def choices() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    kept = torch.arange(STEP) % 2 == 0
    return kept, torch.zeros(2, DIM, dtype=torch.float64), torch.eye(DIM, dtype=torch.float64).expand(2, -1, -1)


def test_a_set_is_remembered_with_its_centre_and_its_covariance():
    head, (kept, mean, covariance) = head_of(), choices()
    first = head.columns(kept, mean, covariance)
    assert head.columns(kept.clone(), mean.clone(), covariance.clone()) is first
    other_set = head.columns(~kept, mean, covariance)
    other_centre = head.columns(kept, mean + 1, covariance)
    other_spread = head.columns(kept, mean, 2 * covariance)
    for found, columns in (
        (other_set, ("e_selection", "e_taylor", "capacity_full_unit")),
        (other_centre, ("e_taylor", "e_diagonal", "capacity_full_unit")),
        (other_spread, ("capacity_full_unit", "capacity_centred_scaled")),
    ):
        for name in columns:
            assert not torch.equal(found[name], first[name]), name
    assert torch.equal(other_spread["e_taylor"], first["e_taylor"])
    assert torch.equal(other_centre["e_selection"], first["e_selection"])


def test_random_numbers_are_shared_by_every_set():
    one, other = head_of(), head_of()
    kept, mean, covariance = choices()
    other.columns(~kept, mean, covariance)
    found, again = one.columns(kept, mean, covariance), other.columns(kept, mean, covariance)
    assert all(torch.equal(found[name], again[name]) or torch.isnan(found[name]).all() for name in found)


def test_a_saturated_information_has_no_shape_gap():
    kept, mean, covariance = choices()
    quiet, loud = (head_of(size).columns(kept, mean, covariance) for size in (1.0, 1e6))
    assert not quiet["capacity_mc_saturated_unit"].any()
    assert torch.allclose(
        quiet["shape_gap_unit"], quiet["capacity_gauss_unit"] - quiet["capacity_mc_unit"], rtol=0, atol=1e-14
    )
    assert loud["capacity_mc_saturated_unit"].all()
    assert torch.isnan(loud["shape_gap_unit"]).all()
    assert loud["capacity_mc_unit"].tolist() == pytest.approx([math.log(COUNT)] * 2, abs=1e-9)
    assert torch.allclose(loud["capacity_mc_scaled"], quiet["capacity_mc_scaled"], atol=1e-9)  # in its own units


def layer_of(keys: torch.Tensor, values: torch.Tensor) -> KVHead:
    g = torch.Generator().manual_seed(0)
    queries = torch.randn(4, STEP + COUNT, DIM, generator=g)
    layer = Layer.from_arrays(queries, keys, values, prompt_length=STEP, scale=0.5, dtype=torch.float64)
    return KVHead.of(layer, View.at(layer, STEP), 1, torch.arange(STEP, STEP + COUNT), Decompose())


@pytest.mark.parametrize("what", ["keys", "values"])
def test_outputs_that_are_all_equal_measure_nothing(what: str) -> None:
    """Rounding is no noise to measure by and no covariance to compare with."""
    g = torch.Generator().manual_seed(3)
    sizes = {"keys": DIM, "values": WIDTH}
    made = {name: 30 * torch.randn(2, STEP + COUNT, size, generator=g) for name, size in sizes.items()}
    made[what] = made[what][:, :1].expand(-1, STEP + COUNT, -1).contiguous()
    found = layer_of(**made).columns(torch.ones(STEP, dtype=torch.bool), *centre(2))
    assert found["sigma2_scaled"].tolist() == [0.0, 0.0]
    for name in ("capacity_gauss_scaled", "capacity_mc_scaled", "diagonal_cov_error_centred"):
        assert bool(found[name].isnan().all()), name
    assert float(found["capacity_full_unit"].max()) < 1e-20


def test_a_pool_that_is_empty_has_no_numbers_and_no_crash() -> None:
    """A chunk that begins at the event leaves no candidate behind."""
    g = torch.Generator().manual_seed(3)
    arrays = [torch.randn(heads, 40, size, generator=g) for heads, size in ((2, DIM), (2, DIM), (2, WIDTH))]
    geometry = {"kind": "chunked", "window": 16}
    layer = Layer.from_arrays(*arrays, prompt_length=32, scale=0.5, dtype=torch.float64, **geometry)
    head = KVHead.of(layer, View.at(layer, 32), 0, torch.arange(32, 40), Decompose())
    found = head.columns(torch.ones(0, dtype=torch.bool), *centre(1))
    assert bool(found["tangent_residual"].isnan().all())
    assert bool(found["e_total"].isnan().all())


def centre(heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    eye = torch.eye(DIM, dtype=torch.float64).expand(heads, -1, -1).contiguous()
    return torch.zeros(heads, DIM, dtype=torch.float64) + 0.3, eye


def test_the_capacity_of_an_objective_counts_no_rounding() -> None:
    """One weight of 1e19 beside ordinary ones: 1/2 log of each strength, nothing for the channel that nobody uses."""
    directions = torch.eye(4, dtype=torch.float64)[[0, 1, 2, 0]][None]
    turn = torch.linalg.qr(torch.randn(4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64))[0]
    weights = torch.tensor([[1e19, 3.0, 0.5, 2.0]], dtype=torch.float64)
    objective = Objective(weights, directions @ turn, torch.ones(1, dtype=torch.float64))
    found = objective_capacity(objective, slice(0, 1), torch.ones(4, dtype=torch.bool))
    expected = 0.5 * (math.log(1e19) + math.log(4.0) + math.log(1.5))
    assert float(found[0]) == pytest.approx(expected, rel=1e-9)
