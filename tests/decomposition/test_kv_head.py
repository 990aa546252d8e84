"""KVHead: what the kept sets of one event share, and what they must not share."""

from __future__ import annotations

import math

import pytest
import torch

from kvtool.decomposition import Decompose, KVHead
from kvtool.layer import Layer
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
