"""Cotangents at the logits: their covariance is the Fisher information, and few draws of signs go far."""

from __future__ import annotations

import pytest
import torch

from kvtool.capture.cotangents import cotangents, pick


def logits_of(scale, tokens=11):
    torch.manual_seed(2)
    return torch.randn(1, tokens, dtype=torch.float64) * scale


def fisher(logits):
    p = logits[0].softmax(-1)
    return p.diag() - p[:, None] * p


def numbers(draws, steps=1):
    return torch.rand(draws, steps, dtype=torch.float64, generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("probe", ["signs", "tokens"])
@pytest.mark.parametrize("scale", [0.3, 3.0])
def test_mean_zero_and_fisher_covariance(probe, scale):
    logits = logits_of(scale)
    found = torch.cat(list(cotangents(probe, logits, numbers(20000))))
    assert float((found.T @ found / 20000 - fisher(logits)).norm() / fisher(logits).norm()) < 0.04
    assert float(found.mean(0).norm() / found.norm(dim=1).mean()) < 0.02
    assert float(found.sum(1).abs().max()) < 1e-13  # a shift of all logits changes nothing


def test_every_pattern_of_signs_together_is_exactly_the_fisher_information():
    """With 4 tokens there are 16 patterns; their exact average leaves no room for a wrong term."""
    logits = logits_of(2.0, 4)
    p = logits[0].softmax(-1)
    many = torch.cat(list(cotangents("signs", logits, numbers(400))))
    patterns = {}
    for row in many:
        # sqrt(p) x is recovered up to the multiple of p that was taken off: the signs name the pattern.
        total = next(t for t in signed_sums(p) if bool(((row + p * t) ** 2 - p).abs().max() < 1e-12))
        patterns[tuple((row + p * total > 0).tolist())] = row
    assert len(patterns) == 16
    rows = torch.stack(list(patterns.values()))
    assert float((rows.T @ rows / 16 - fisher(logits)).abs().max()) < 1e-14


def signed_sums(p):
    signs = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0], dtype=torch.float64)] * p.numel())
    return (signs @ p.sqrt()).tolist()


def test_a_nearly_certain_model_needs_few_signs_and_many_tokens():
    logits = torch.tensor([[9.0, 0.0, 0.0, 0.0, 2.0]], dtype=torch.float64)
    direction = torch.tensor([0.0, 1.0, -1.0, 0.5, 2.0], dtype=torch.float64)
    exact = float(direction @ fisher(logits) @ direction)
    errors = {}
    for probe in ("signs", "tokens"):
        found = torch.stack(list(cotangents(probe, logits, numbers(1000))))[:, 0] @ direction
        errors[probe] = float(found.square().view(125, 8).mean(1).sub(exact).square().mean().sqrt()) / exact
    assert errors["signs"] < 0.25
    assert errors["tokens"] > 1.5


def test_draws_are_decided_by_their_own_number_alone():
    logits = torch.cat([logits_of(1.0), 2 * logits_of(1.0)])
    drawn = numbers(3, 2)
    for probe in ("signs", "tokens"):
        whole = list(cotangents(probe, logits, drawn))
        (last,) = cotangents(probe, logits[1:], drawn[2:, 1:])
        assert torch.equal(whole[2][1:], last)
        assert not torch.equal(whole[0], whole[2])


def test_a_picked_token_is_where_the_distribution_function_passes():
    p = torch.tensor([0.5, 0.0, 0.25, 0.25], dtype=torch.float64)
    assert [pick(p, u) for u in (0.0, 0.499, 0.5, 0.74, 0.75, 0.9999999)] == [0, 0, 2, 2, 3, 3]
    (found,) = cotangents("tokens", p.log()[None], torch.tensor([[0.6]], dtype=torch.float64))
    assert found[0].tolist() == pytest.approx([-0.5, 0.0, 0.75, -0.25])


def test_the_dtype_is_the_logits_own():
    (found,) = cotangents("signs", logits_of(1.0).to(torch.bfloat16), numbers(1))
    assert found.dtype == torch.bfloat16


def test_probabilities_need_not_add_up_exactly():
    p = torch.tensor([0.5, 0.4], dtype=torch.float64)
    assert [pick(p, u) for u in (0.5, 0.55, 0.56, 0.99)] == [0, 0, 1, 1]


@pytest.mark.parametrize("probe", ["signs", "tokens"])
def test_half_precision_rounds_the_cotangent_once(probe):
    logits = logits_of(2.0, 200).to(torch.bfloat16)
    for found, exact in zip(
        cotangents(probe, logits, numbers(3)), cotangents(probe, logits.double(), numbers(3)), strict=True
    ):
        assert torch.equal(found, exact.to(torch.bfloat16))
