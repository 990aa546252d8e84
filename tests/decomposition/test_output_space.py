"""Output space: the terms add up as vectors and as numbers, and a wrong derivative is found out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtool.decomposition.output_space import PAIRS, TERMS, OutputTerms, tangent_residual
from kvtool.kernels.tangent import attend, tangent_at

torch.set_num_threads(1)


def problem(group=2, count=9, tokens=12, kept=5, dim=6, width=4, softcap=None, sinks=False, seed=0):
    g = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    how = {"scale": 0.6, "softcap": softcap, "sink_logits": draw(group) if sinks else None}
    chosen = torch.randperm(tokens, generator=g)[:kept].sort().values
    return draw(group, count, dim), draw(tokens, dim), draw(tokens, width), chosen, draw(group, dim), how


def terms_of(queries, keys, values, chosen, centre, how):
    tangent = tangent_at(centre, keys[chosen], values[chosen], **how)
    full, diagonal = tangent.full_matrix(), tangent.diagonal_matrix()
    pool, kept = attend(queries, keys, values, **how), attend(queries, keys[chosen], values[chosen], **how)
    return OutputTerms.of(pool, kept, queries - centre[:, None], tangent, full, diagonal), tangent, full


@given(
    group=st.integers(1, 3),
    count=st.integers(1, 6),
    tokens=st.integers(2, 12),
    share=st.floats(0.01, 1.0),
    dim=st.integers(1, 6),
    width=st.integers(1, 6),
    softcap=st.sampled_from([None, 2.0]),
    sinks=st.booleans(),
    seed=st.integers(0, 10_000),
)
@settings(max_examples=60, deadline=None)
def test_terms_add_up(group, count, tokens, share, dim, width, softcap, sinks, seed):
    kept = max(1, round(share * tokens))
    terms, *_ = terms_of(*problem(group, count, tokens, kept, dim, width, softcap, sinks, seed))
    total = sum(terms.parts.values())
    assert float((terms.total - total).abs().max()) <= 1e-12 * (1 + float(total.abs().max()))
    found = terms.columns()
    square = sum(found[f"e_{name}"] ** 2 for name in TERMS) + sum(found[f"cross_{a}_{b}"] for a, b in PAIRS)
    assert torch.allclose(found["e_total"] ** 2, square, rtol=1e-10, atol=1e-12)
    assert (found["e_total"] <= sum(found[f"e_{name}"] for name in TERMS) * (1 + 1e-12) + 1e-14).all()
    assert (found["identity_residual"] < 1e-10).all()


def test_terms_equal_their_definitions_token_by_token():
    queries, keys, values, chosen, centre, how = problem(softcap=2.0, sinks=True)
    terms, tangent, _ = terms_of(queries, keys, values, chosen, centre, how)
    shift = queries - centre[:, None]
    straight, alone = tangent.full(shift), tangent.diagonal(shift)
    at_centre = attend(centre[:, None], keys[chosen], values[chosen], **how)
    assert torch.allclose(terms.signal, terms.kept - at_centre, rtol=0, atol=1e-14)
    assert torch.allclose(terms.parts["selection"], terms.pool - terms.kept, rtol=0, atol=0)
    assert torch.allclose(terms.parts["taylor"], terms.kept - at_centre - straight, rtol=0, atol=1e-13)
    assert torch.allclose(terms.parts["diagonal"], straight - alone, rtol=0, atol=1e-13)
    assert torch.allclose(terms.total, terms.pool - (at_centre + alone), rtol=0, atol=1e-13)
    relative = (terms.pool - terms.kept)[1].norm() / terms.pool[1].norm()
    assert float(terms.columns()["e_selection"][1]) == pytest.approx(float(relative), rel=1e-12)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_wrong_derivative_is_found_out(sinks, softcap):
    queries, keys, values, chosen, centre, how = problem(sinks=sinks, softcap=softcap)
    _, tangent, full = terms_of(queries, keys, values, chosen, centre, how)
    shift = queries - centre[:, None]

    def residual(matrix):
        return tangent_residual(shift, centre, tangent, matrix, softcap, how["sink_logits"])

    assert (residual(full) < 1e-7).all()
    for row, column in ((0, 0), (3, 5), (1, 2)):
        wrong = full.clone()
        wrong[:, row, column] *= 1.001
        assert (residual(wrong) > 1e-5).any()
    assert (residual(tangent.diagonal_matrix()) > 1e-2).all()
    assert (residual(full * 1.0001) > 5e-5).all()


def test_one_kept_token_has_no_tangent_and_no_residual():
    queries, keys, values, _, centre, how = problem()
    terms, tangent, full = terms_of(queries, keys, values, torch.tensor([4]), centre, how)
    found = terms.columns()
    assert not found["tangent_signal"].any()
    assert not found["e_taylor"].any()
    assert not found["e_diagonal"].any()
    assert torch.equal(found["e_total"], found["e_selection"])
    shift = queries - centre[:, None]
    assert not tangent_residual(shift, centre, tangent, full, None, None).any()


def test_no_output_at_all_is_undefined():
    queries, keys, values, chosen, centre, how = problem()
    terms, *_ = terms_of(queries, keys, torch.zeros_like(values), chosen, centre, how)
    found = terms.columns()
    assert all(torch.isnan(column).all() for column in found.values())


def test_the_identity_residual_is_what_the_total_lacks():
    terms, *_ = terms_of(*problem())
    wrong = replace(terms, total=terms.total + 1e-3 * terms.pool)
    assert float(wrong.columns()["identity_residual"][0]) == pytest.approx(1e-3, rel=1e-9)


@pytest.mark.parametrize("sinks", [False, True])
def test_one_dominant_token_drowns_no_residual_in_rounding(sinks):
    """All but 1e-9 of the weight on one token, whose direction is long: the tangent is tiny beside the output."""
    queries, keys, values, chosen, centre, how = problem(sinks=sinks)
    keys[chosen[0]] = 60.0 * centre.mean(0) / centre.mean(0).norm() ** 2 / how["scale"]
    centre = centre.mean(0, keepdim=True).repeat(2, 1)
    values[chosen[0]] *= 100
    tangent = tangent_at(centre, keys[chosen], values[chosen], **how)
    assert float(tangent.weights.amax()) > 1 - 1e-9
    shift, full = queries - centre[:, None], tangent.full_matrix()
    assert (tangent_residual(shift, centre, tangent, full, None, how["sink_logits"]) < 1e-7).all()
    wrong = full + 1e-4 * values.norm(dim=1).amax()
    assert (tangent_residual(shift, centre, tangent, wrong, None, how["sink_logits"]) > 1e-2).all()
