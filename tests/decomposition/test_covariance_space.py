"""Covariance space: against the matrices written out, against sampling, and capacities against closed forms."""

from __future__ import annotations

import math

import pytest
import torch

from kvtool.decomposition.covariance_space import (
    capacities,
    covariances,
    output_root,
    relative_errors,
    roots,
    rounding_floor,
)
from kvtool.kernels.tangent import tangent_at

torch.set_num_threads(1)


def problem(tokens=9, dim=5, width=4, softcap=None, sinks=False, seed=0):
    g = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    root = draw(2, dim, dim)
    how = {"scale": 0.5, "softcap": softcap, "sink_logits": draw(2) if sinks else None}
    tangent = tangent_at(draw(2, dim), draw(tokens, dim), draw(tokens, width), **how)
    return tangent, root @ root.transpose(1, 2)


def found_of(tangent, lam):
    return covariances(roots(tangent, tangent.full_matrix(), tangent.diagonal_matrix(), lam))


@pytest.mark.parametrize(("softcap", "sinks"), [(None, False), (2.0, False), (None, True), (2.0, True)])
def test_covariances_equal_the_matrices_written_out(softcap, sinks):
    tangent, lam = problem(softcap=softcap, sinks=sinks)
    found = found_of(tangent, lam)
    for head in range(2):
        a = torch.cat([tangent.weights[head], tangent.sink_weight[head, None]])  # the sink is a token of zeros
        keys = torch.cat([tangent.slopes[head][:, None] * tangent.keys, torch.zeros(1, 5, dtype=torch.float64)])
        u = torch.cat([tangent.directions, torch.zeros(1, 4, dtype=torch.float64)])
        s = torch.diag(a) - torch.outer(a, a)
        alone = torch.diag(s.diagonal())
        centred = keys - a @ keys
        response = keys @ lam[head] @ keys.T
        expected = {
            "full": u.T @ s @ response @ s @ u,
            "competition": u.T @ alone @ response @ alone @ u,
            "response": u.T @ alone @ torch.diag(response.diagonal()) @ alone @ u,
            "centred": u.T @ s @ torch.diag((centred @ lam[head] @ centred.T).diagonal()) @ s @ u,
        }
        for kind, matrix in expected.items():
            close = float((found[kind][head] - tangent.scale**2 * matrix).abs().max())
            assert close <= 1e-12 * (1 + float(matrix.abs().max())), kind
    errors = relative_errors(found, rounding_floor(tangent, lam))
    gap = (found["full"] - found["centred"])[1].norm() / found["full"][1].norm()
    assert float(errors["diagonal_cov_error_centred"][1]) == pytest.approx(float(gap), rel=1e-12)


def test_covariances_equal_those_of_sampled_queries():
    tangent, lam = problem(sinks=True)
    found = found_of(tangent, lam)
    g = torch.Generator().manual_seed(1)
    count = 200_000
    factor = torch.linalg.cholesky(lam)
    noise = torch.randn(2, count, 5, generator=g, dtype=torch.float64)
    shift = noise @ factor.transpose(1, 2)
    for kind, moved in (("full", tangent.full(shift)), ("competition", tangent.diagonal(shift))):
        sampled = moved.transpose(1, 2) @ moved / count
        for head in range(2):
            error = (sampled[head] - found[kind][head]).norm() / found[kind][head].norm()
            assert float(error) < 0.02, kind  # 4 standard errors at 200,000 draws
    apart = torch.zeros(2, count, 4, dtype=torch.float64)  # tokens answer queries of their own
    for token in range(tangent.keys.shape[0]):
        own = torch.randn(2, count, 5, generator=g, dtype=torch.float64) @ factor.transpose(1, 2)
        weight = tangent.weights[:, token] * (1 - tangent.weights[:, token])
        moved = tangent.scale * (own @ tangent.keys[token]) * (weight * tangent.slopes[:, token])[:, None]
        apart += moved[:, :, None] * tangent.directions[token]
    sampled = apart.transpose(1, 2) @ apart / count
    assert float((sampled - found["response"]).norm() / found["response"].norm()) < 0.02


def test_a_response_that_is_zero_leaves_the_errors_undefined():
    tangent, lam = problem(tokens=1)
    found = found_of(tangent, lam)
    assert not found["full"].any()
    assert all(torch.isnan(column).all() for column in relative_errors(found, rounding_floor(tangent, lam)).values())


def test_centred_does_not_mind_a_key_shift_and_diagonal_does():
    tangent, lam = problem()
    moved = tangent_at(torch.zeros(2, 5, dtype=torch.float64), tangent.keys, tangent.directions, scale=0.5)
    shifted = tangent_at(torch.zeros(2, 5, dtype=torch.float64), tangent.keys + 3.0, tangent.directions, scale=0.5)
    before, after = found_of(moved, lam), found_of(shifted, lam)
    assert torch.allclose(before["centred"], after["centred"], rtol=1e-10, atol=1e-12)
    assert torch.allclose(before["full"], after["full"], rtol=1e-10, atol=1e-12)
    assert not torch.allclose(before["response"], after["response"], rtol=0.5)


def test_capacities_equal_closed_forms():
    strengths = torch.tensor([4.0, 1.0, 0.0], dtype=torch.float64)
    turn = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64))[0]
    covariance = (turn * strengths) @ turn.T
    noises = torch.tensor([[1.0, 0.25, 0.0]], dtype=torch.float64)
    found = capacities([(turn * strengths.sqrt()).T], noises)[0]
    assert float(found[0]) == pytest.approx(0.5 * (math.log(5) + math.log(2)), rel=1e-12)
    assert float(found[1]) == pytest.approx(0.5 * (math.log(17) + math.log(5)), rel=1e-12)
    assert math.isnan(float(found[2]))
    whole = 0.5 * torch.linalg.slogdet(torch.eye(3, dtype=torch.float64) + covariance / 0.25).logabsdet
    assert float(found[1]) == pytest.approx(float(whole), rel=1e-12)


def test_output_covariance_divides_by_the_number_of_queries():
    outputs = torch.randn(2, 50, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 7
    for head in range(2):
        expected = torch.cov(outputs[head].T, correction=0)
        root = output_root(outputs)[head]
        assert torch.allclose(root.T @ root, expected, rtol=1e-12)


@pytest.mark.parametrize("scale", [1.0, 1e5, 1e9])
@pytest.mark.parametrize("rows", [3, 40])
def test_capacity_of_a_deficient_covariance_counts_no_rounding(scale, rows):
    """Three directions in six channels: the others add nothing, however large the three are."""
    g = torch.Generator().manual_seed(0)
    turn = torch.linalg.qr(torch.randn(6, 6, generator=g, dtype=torch.float64))[0]
    mixing = torch.linalg.qr(torch.randn(rows, 3, generator=g, dtype=torch.float64))[0]
    sizes = scale * torch.tensor([3.0, 1.0, 0.5], dtype=torch.float64)
    root = mixing @ (sizes[:, None] * turn[:3])
    found = float(capacities([root], torch.ones(1, 1, dtype=torch.float64))[0, 0])
    assert found == pytest.approx(0.5 * float(torch.log1p(sizes.square()).sum()), rel=1e-12)


def test_keys_that_are_all_equal_leave_the_errors_undefined():
    """Cov_full is zero then; what is computed of it is rounding."""
    tangent, lam = problem()
    even = tangent_at(
        torch.randn(2, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64),
        tangent.keys[:1].expand(9, -1).contiguous(),
        tangent.directions,
        scale=0.5,
    )
    errors = relative_errors(found_of(even, lam), rounding_floor(even, lam))
    assert all(torch.isnan(column).all() for column in errors.values())
