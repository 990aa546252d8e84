"""Quadratic forms and R-KV's near-duplicates, tile by tile, against loops."""

import pytest
import torch

from kvtool.policies import quadratic_forms as forms_file
from kvtool.policies import r_kv
from kvtool.policies.quadratic_forms import quadratic_forms

F64 = torch.float64


@pytest.mark.parametrize(("count", "dim", "heads"), [(1, 3, 1), (63, 5, 4), (111, 80, 3), (0, 4, 2)])
@pytest.mark.parametrize("tile", [1, 10, 1024])
def test_forms_are_those_of_one_vector_at_a_time(monkeypatch, count, dim, heads, tile):
    monkeypatch.setattr(forms_file, "TILE", tile)
    g = torch.Generator().manual_seed(count)
    x = torch.randn(count, dim, generator=g, dtype=F64)
    m = torch.randn(heads, dim, dim, generator=g, dtype=F64)
    m = m + m.transpose(1, 2)
    found = quadratic_forms(x, m)
    expected = torch.tensor([[float(v @ own @ v) for v in x] for own in m], dtype=F64).view(heads, count)
    assert found.shape == (heads, count)
    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-11)


def dumb_cosines(keys, threshold):
    """[N], pair by pair."""
    unit = keys / keys.norm(dim=1, keepdim=True).clamp_min(1e-12)
    total = torch.zeros(len(keys), dtype=F64)
    for i in range(len(keys)):
        cosines = [0.0 if i == j else float(unit[i] @ unit[j]) for j in range(len(keys))]
        near = [j for j in range(len(keys)) if j != i and cosines[j] > threshold]
        if near:
            cosines[near[-1]] = 0.0
        total += torch.tensor(cosines, dtype=F64)
    return total / len(keys)


@pytest.mark.parametrize("strip", [1, 7, 1024])
@pytest.mark.parametrize("block", [1, 9, None])
@pytest.mark.parametrize("threshold", [-0.5, 0.0, 0.3, 0.9, 2.0])
def test_the_newest_near_duplicate_is_spared_however_the_keys_are_cut(monkeypatch, strip, block, threshold):
    monkeypatch.setattr(r_kv, "STRIP", strip)
    keys = torch.randn(41, 4, generator=torch.Generator().manual_seed(1), dtype=F64)
    keys[5] = 0.0
    keys[30] = keys[12]
    found = r_kv.mean_cosines(keys, threshold, block)
    assert float((found - dumb_cosines(keys, threshold)).abs().max()) < 1e-14
