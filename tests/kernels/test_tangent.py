"""Tangents against the softmax's Jacobian written out, and against finite differences."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtool.kernels.tangent import attend, reference, tangent_at

torch.set_num_threads(1)
CASES = [
    pytest.param({}, id="plain"),
    pytest.param({"softcap": 3.0}, id="softcap"),
    pytest.param({"sinks": True}, id="sink"),
    pytest.param({"softcap": 2.0, "sinks": True}, id="both"),
]


def problem(group=3, count=7, tokens=11, dim=5, width=6, softcap=None, sinks=False, seed=0):
    g = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    how = {"scale": 0.7, "softcap": softcap, "sink_logits": draw(group) if sinks else None}
    return draw(group, count, dim), draw(tokens, dim), draw(tokens, width), draw(group, dim), how


def slow_weights(query, keys, scale, softcap, sink):
    """Weights and capped logits of one query, token by token."""
    logits = []
    for key in keys:
        z = scale * sum(float(a) * float(b) for a, b in zip(query, key, strict=True))
        logits.append(z if softcap is None else softcap * math.tanh(z / softcap))
    total = sum(math.exp(z) for z in logits) + (0.0 if sink is None else math.exp(float(sink)))
    return [math.exp(z) / total for z in logits], logits


def slow_tangents(shift, centre, keys, directions, how, head):
    """J dq and JD dq of one shift with S = Diag(a) - a a^T as a matrix."""
    sink = None if how["sink_logits"] is None else how["sink_logits"][head]
    weights, logits = slow_weights(centre, keys, how["scale"], how["softcap"], sink)
    a = torch.tensor(weights, dtype=torch.float64)
    jacobian = torch.diag(a) - torch.outer(a, a)
    cap = how["softcap"]
    moved = torch.tensor(
        [
            how["scale"] * float(shift @ key) * (1.0 if cap is None else 1 - (z / cap) ** 2)
            for key, z in zip(keys, logits, strict=True)
        ],
        dtype=torch.float64,
    )
    return directions.T @ (jacobian @ moved), directions.T @ (torch.diag(jacobian.diagonal()) @ moved)


def check_against_explicit_jacobian(queries, keys, directions, centre, how):
    tangent = tangent_at(centre, keys, directions, **how)
    shift = queries - centre[:, None]
    full, diagonal = tangent.full(shift), tangent.diagonal(shift)
    by_matrix = shift @ tangent.full_matrix().transpose(1, 2), shift @ tangent.diagonal_matrix().transpose(1, 2)
    for head in range(queries.shape[0]):
        for row in range(queries.shape[1]):
            whole, alone = slow_tangents(shift[head, row], centre[head], keys, directions, how, head)
            size = 1 + float(whole.abs().max()) + float(alone.abs().max())
            for found, expected in ((full, whole), (by_matrix[0], whole), (diagonal, alone), (by_matrix[1], alone)):
                assert float((found[head, row] - expected).abs().max()) <= 1e-12 * size


@pytest.mark.parametrize("case", CASES)
def test_tangents_equal_the_explicit_jacobian(case):
    queries, keys, directions, centre, how = problem(**case)
    check_against_explicit_jacobian(queries, keys, directions, centre, how)
    assert tangent_at(centre, keys, directions, **how).full(queries).abs().max() > 1e-3


@pytest.mark.parametrize("case", CASES)
def test_outputs_equal_a_loop_over_tokens(case):
    queries, keys, directions, _, how = problem(**case)
    found = attend(queries, keys, directions, **how)
    for head, row in ((0, 0), (1, 3), (2, 6)):
        sink = None if how["sink_logits"] is None else how["sink_logits"][head]
        weights, _ = slow_weights(queries[head, row], keys, how["scale"], how["softcap"], sink)
        expected = sum(w * u for w, u in zip(weights, directions, strict=True))
        assert float((found[head, row] - expected).abs().max()) <= 1e-13


@pytest.mark.parametrize("case", CASES)
def test_finite_differences_equal_the_matrix(case):
    _, keys, directions, centre, how = problem(**case)
    full = tangent_at(centre, keys, directions, **how).full_matrix()
    step = 1e-5
    for channel in range(keys.shape[1]):
        moved = torch.zeros(1, keys.shape[1], dtype=torch.float64)
        moved[0, channel] = step
        ahead, behind = (attend(centre[:, None] + sign * moved, keys, directions, **how)[:, 0] for sign in (1, -1))
        assert float(((ahead - behind) / (2 * step) - full[:, :, channel]).abs().max()) <= 1e-6 * float(
            full.abs().max()
        )


@given(
    group=st.integers(1, 4),
    count=st.integers(1, 5),
    tokens=st.integers(1, 9),
    dim=st.integers(1, 7),
    width=st.integers(1, 7),
    softcap=st.sampled_from([None, 1.5, 20.0]),
    sinks=st.booleans(),
    loud=st.sampled_from([0.1, 1.0, 30.0]),
    seed=st.integers(0, 10_000),
)
@settings(max_examples=60, deadline=None)
def test_any_shape_equals_the_explicit_jacobian(group, count, tokens, dim, width, softcap, sinks, loud, seed):
    queries, keys, directions, centre, how = problem(group, count, tokens, dim, width, softcap, sinks, seed)
    check_against_explicit_jacobian(queries, keys, directions, loud * centre, how)
    assert tangent_at(centre, keys, directions, **how).weights.shape == (group, tokens)


@pytest.mark.parametrize("case", CASES)
def test_what_common_shifts_leave_of_dropped_competition(case):
    queries, keys, directions, centre, how = problem(**case)
    tangent = tangent_at(centre, keys, directions, **how)
    shift = queries - centre[:, None]
    moved = tangent.responses(shift)
    a = tangent.weights[:, None]
    centred = moved - (a * moved).sum(-1, keepdim=True)
    alone = (a * (1 - a) * centred) @ directions
    found = shift @ tangent.concentrated_matrix().transpose(1, 2)
    assert torch.allclose(found, tangent.full(shift) - alone, rtol=0, atol=1e-13)
    assert found.abs().max() > 1e-3


def test_one_token_does_not_respond_and_a_sink_makes_it_respond():
    queries, keys, directions, centre, how = problem(tokens=1)
    alone = tangent_at(centre, keys, directions, **how)
    assert not alone.full(queries).any()
    assert not alone.full_matrix().any()
    assert not alone.diagonal_matrix().any()
    queries, keys, directions, centre, how = problem(tokens=1, sinks=True)
    with_sink = tangent_at(centre, keys, directions, **how)
    assert with_sink.full_matrix().abs().max() > 0.01
    assert torch.allclose(with_sink.full_matrix(), with_sink.diagonal_matrix(), rtol=0, atol=1e-15)


def test_a_shift_common_to_all_keys_is_no_response():
    _, keys, directions, centre, how = problem()
    moved = keys + 5.0
    for matrix, same in (("full_matrix", True), ("diagonal_matrix", False)):
        before = getattr(tangent_at(centre, keys, directions, **how), matrix)()
        after = getattr(tangent_at(centre, moved, directions, **how), matrix)()
        assert torch.allclose(before, after, rtol=0, atol=1e-12) == same


def test_an_empty_set_gives_zero():
    queries, keys, directions, centre, how = problem(sinks=True)
    for sinks in (how["sink_logits"], None):
        empty = {**how, "sink_logits": sinks}
        assert not attend(queries, keys[:0], directions[:0], **empty).any()
        assert not tangent_at(centre, keys[:0], directions[:0], **empty).full_matrix().any()


def test_loud_logits_neither_overflow_nor_underflow():
    queries, keys, directions, centre, how = problem(sinks=True)
    for lift in (-2000.0, 2000.0):
        loud = {**how, "sink_logits": how["sink_logits"] + lift}
        assert torch.isfinite(attend(200 * queries, keys, directions, **loud)).all()
        assert torch.isfinite(tangent_at(200 * centre, keys, directions, **loud).full_matrix()).all()
    far = keys - 1e4 * centre[0] / centre[0].norm()
    assert abs(float(attend(centre[:1, None], far, torch.ones_like(directions), scale=1.0)[0, 0, 0]) - 1) < 1e-12


def test_blocks_change_nothing(monkeypatch):
    queries, keys, directions, centre, how = problem(count=23, softcap=2.0, sinks=True)
    tangent = tangent_at(centre, keys, directions, **how)
    whole = attend(queries, keys, directions, **how), tangent.full(queries), tangent.diagonal(queries)
    monkeypatch.setattr(reference, "BLOCK_NUMBERS", 3 * 11 * 4)
    parts = attend(queries, keys, directions, **how), tangent.full(queries), tangent.diagonal(queries)
    for one, other in zip(whole, parts, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-14)


def test_shapes_that_do_not_fit_are_refused():
    queries, keys, directions, centre, how = problem()
    with pytest.raises(ValueError, match="do not fit"):
        attend(queries[:, :, :-1], keys, directions, **how)
    with pytest.raises(ValueError, match="do not fit"):
        tangent_at(centre, keys, directions[:-1], **how)
    with pytest.raises(ValueError, match="sink_logits"):
        attend(queries, keys, directions, scale=1.0, sink_logits=torch.zeros(2))
