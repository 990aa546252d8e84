"""Rotary embedding against complex multiplication, for every layout."""

from __future__ import annotations

import cmath

import pytest
import torch

from kvtool.errors import KvtoolError
from kvtool.rotation import Layout, Rotation


def pairs(layout: Layout, start: int, dims: int) -> list[tuple[int, int]]:
    half = dims // 2
    if layout == "half":
        return [(start + i, start + i + half) for i in range(half)]
    return [(start + 2 * i, start + 2 * i + 1) for i in range(half)]


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize(("start", "dims", "dim"), [(0, 8, 8), (0, 4, 10), (6, 6, 12)])
@pytest.mark.parametrize("scaling", [1.0, 1.3466])
def test_rotate_is_a_complex_turn_and_unrotate_undoes_it(
    layout: Layout, start: int, dims: int, dim: int, scaling: float
) -> None:
    inv_freq = 100.0 ** -(torch.arange(dims // 2) / (dims // 2))
    rotation = Rotation(dims, layout, inv_freq, scaling, start)
    x = torch.randn(2, 5, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([0, 1, 7, 400, 401])
    turned = rotation.rotate(x, positions)
    expected = x.clone()
    for head in range(2):
        for n, position in enumerate(positions.tolist()):
            for frequency, (a, b) in enumerate(pairs(layout, start, dims)):
                angle = float(torch.tensor(float(position)) * inv_freq[frequency])  # the model's float32 product
                z = complex(x[head, n, a], x[head, n, b]) * cmath.exp(1j * angle) * scaling
                expected[head, n, a], expected[head, n, b] = z.real, z.imag
    assert torch.allclose(turned, expected, rtol=0, atol=5e-7)  # cos and sin are float32, as in the model
    assert torch.allclose(rotation.unrotate(turned, positions), x, rtol=0, atol=1e-12)
    untouched = [c for c in range(dim) if not start <= c < start + dims]
    assert torch.equal(turned[..., untouched], x[..., untouched])


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_mean_rotation_is_the_mean_of_rotations(layout: Layout) -> None:
    rotation = Rotation(6, layout, torch.tensor([1.0, 0.3, 0.01]), 1.2, 2)
    x = torch.randn(3, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    positions = torch.arange(90, 120)
    every = torch.stack([rotation.rotate(x[:, None, :], p[None])[:, 0] for p in positions])
    assert torch.allclose(rotation.rotate_by_mean(x, positions), every.mean(0), rtol=0, atol=1e-12)
    matrix = rotation.mean_matrix(positions, 10)
    assert torch.allclose(x @ matrix.T, every.mean(0), rtol=0, atol=1e-12)


def test_recorded_tables_rotate_their_rows_and_refuse_others() -> None:
    angles = torch.rand(5, 2)
    rotation = Rotation(4, "half", cos=angles.cos(), sin=angles.sin())
    x = torch.randn(5, 4)
    rows = torch.arange(5)
    assert not rotation.by_position
    assert torch.allclose(rotation.unrotate(rotation.rotate(x, rows, rows), rows, rows), x, atol=1e-6)
    with pytest.raises(KvtoolError, match="row by row"):
        rotation.rotate(x, torch.arange(5, 10))
