"""Leverage against plain inverses and loops."""

import math
from fractions import Fraction

import pytest
import torch

from kvtool.kernels.leverage import LeverageError, leverage_scores, reference, weighted_gram


def dumb(u, w, ridge, eps):
    """[N]: the definition, one outer product at a time, an explicit inverse."""
    a = ridge * torch.eye(u.shape[1], dtype=torch.float64)
    for i in range(u.shape[0]):
        a += (w[i] + eps) * torch.outer(u[i], u[i])
    inverse = torch.linalg.inv(a)
    return torch.stack([w[i] * (u[i] @ inverse @ u[i]) for i in range(u.shape[0])])


@pytest.mark.parametrize(("tokens", "dim", "tile"), [(1, 3, 4096), (7, 16, 3), (63, 5, 10), (111, 8, 37)])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_equals_the_definition(monkeypatch, tokens, dim, tile, kv_heads):
    monkeypatch.setattr(reference, "TILE_TOKENS", tile)
    g = torch.Generator().manual_seed(tokens)
    u = torch.randn(kv_heads, tokens, dim, generator=g, dtype=torch.float64)
    w = torch.rand(4, tokens, generator=g, dtype=torch.float64)
    ridge = torch.tensor([1.0, 0.1, 10.0, 1.0], dtype=torch.float64)
    found = leverage_scores(u, w, ridge, weight_eps=1e-3)
    for head in range(4):
        expected = dumb(u[head * kv_heads // 4], w[head], float(ridge[head]), 1e-3)
        assert float((found.scores[head] - expected).abs().max()) < 1e-12
        assert float(found.rho[head]) == pytest.approx(float(expected.sum()) / dim, abs=1e-13)
        assert 0 <= float(found.rho[head]) < 1
    assert bool(((found.scores >= 0) & (found.scores < 1)).all())


def test_scaling_weights_and_ridge_together_changes_nothing():
    g = torch.Generator().manual_seed(1)
    u = torch.randn(1, 30, 6, generator=g, dtype=torch.float64)
    w = torch.rand(1, 30, generator=g, dtype=torch.float64)
    base = leverage_scores(u, w, torch.ones(1)).scores
    scaled = leverage_scores(u, w * 1e-6, torch.full((1,), 1e-6, dtype=torch.float64)).scores
    assert float((base - scaled).abs().max()) < 1e-12
    assert float((base - leverage_scores(u, w * 1e-6, torch.ones(1)).scores).abs().max()) > 0.1


def test_a_small_leverage_is_the_weighted_norm():
    u = torch.randn(1, 9, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    w = torch.full((1, 9), 1e-9, dtype=torch.float64)
    found = leverage_scores(u, w, torch.full((1,), 2.0))
    assert float((found.scores / (w * u.square().sum(-1) / 2.0) - 1).abs().max()) < 1e-7
    assert float(found.rho) < 1e-8


def test_redundant_tokens_share_their_direction():
    u = torch.zeros(1, 5, 3, dtype=torch.float64)
    u[0, :4, 0] = 10.0
    u[0, 4, 1] = 10.0
    found = leverage_scores(u, torch.ones(1, 5), torch.ones(1))
    assert found.scores[0].tolist() == pytest.approx([100 / 401] * 4 + [100 / 101], rel=1e-12)


def test_rank_one_pool_is_no_trouble():
    u = torch.ones(1, 4, 64)
    found = leverage_scores(u, torch.ones(1, 4), torch.ones(1))
    assert found.scores[0].tolist() == pytest.approx([64 / 257] * 4, rel=1e-12)


def test_gram_is_symmetric_and_wide():
    u = torch.randn(50, 7, generator=torch.Generator().manual_seed(3))
    gram = weighted_gram(u, torch.rand(50))
    assert gram.dtype == torch.float64
    assert float((gram - gram.T).abs().max()) < 1e-13


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_names_the_head(bad):
    w = torch.ones(4, 6)
    w[2, 1] = bad
    with pytest.raises(LeverageError, match="query head 2"):
        leverage_scores(torch.ones(2, 6, 3), w, torch.ones(4))


def test_an_indefinite_matrix_names_the_head():
    with pytest.raises(LeverageError, match="query head 0 is not positive definite"):
        leverage_scores(torch.eye(3)[None], -2 * torch.ones(1, 3), torch.ones(1))


def exact(u, w, ridge):
    """[N] in rational arithmetic: Gauss and Jordan without rounding."""
    dim = len(u[0])
    rows = [
        [
            sum((Fraction(c) * Fraction(x[a]) * Fraction(x[b]) for x, c in zip(u, w, strict=True)), Fraction(0))
            + (Fraction(ridge) if a == b else 0)
            for b in range(dim)
        ]
        + [Fraction(int(a == b)) for b in range(dim)]
        for a in range(dim)
    ]
    for i in range(dim):
        rows[i] = [value / rows[i][i] for value in rows[i]]
        for r in range(dim):
            if r != i:
                factor = rows[r][i]
                rows[r] = [x - factor * y for x, y in zip(rows[r], rows[i], strict=True)]
    inverse = [row[dim:] for row in rows]
    found = []
    for x, c in zip(u, w, strict=True):
        wide = [Fraction(value) for value in x]
        found.append(Fraction(c) * sum(wide[a] * inverse[a][b] * wide[b] for a in range(dim) for b in range(dim)))
    return torch.tensor([float(value) for value in found], dtype=torch.float64)


@pytest.mark.parametrize(("decades", "bound"), [(4, 1e-12), (8, 1e-10), (12, 1e-8), (16, 1e-8), (24, 1e-6), (40, 1e-6)])
def test_weights_that_differ_by_many_orders_of_magnitude(decades, bound):
    for seed in range(10):
        g = torch.Generator().manual_seed(seed)
        u = torch.randn(1, 14, 5, generator=g, dtype=torch.float64)
        w = 10 ** (decades * torch.rand(1, 14, generator=g, dtype=torch.float64))
        found = leverage_scores(u, w, torch.ones(1))
        truth = exact(u[0].tolist(), w[0].tolist(), 1)
        assert float((found.scores[0] / truth - 1).abs().max()) < bound
        assert float(found.rho) < 1 + bound
        assert float(found.jitter) == 0.0


def test_what_no_factorisation_can_hold_gets_a_higher_ridge_and_says_so():
    u = torch.eye(3, dtype=torch.float64)[None]
    w = torch.tensor([[1e80, 1.0, 1.0]], dtype=torch.float64)
    found = leverage_scores(u, w, torch.ones(1))
    assert 0 < float(found.jitter) <= 1e-12
    assert found.scores[0].tolist() == pytest.approx([1.0, 0.0, 0.0], abs=1e-9)


def test_a_loose_direction_joins_the_matrix_and_no_token():
    g = torch.Generator().manual_seed(5)
    u = torch.randn(2, 9, 4, generator=g, dtype=torch.float64)
    w = torch.rand(2, 9, generator=g, dtype=torch.float64)
    loose = torch.randn(2, 4, generator=g, dtype=torch.float64)
    for scale in (1.0, 1e20):  # by either factorisation
        found = leverage_scores(u, scale * w, torch.tensor([scale, 0.3], dtype=torch.float64), loose=scale**0.5 * loose)
        for head, ridge in enumerate((scale, 0.3)):
            a = ridge * torch.eye(4, dtype=torch.float64) + scale * torch.outer(loose[head], loose[head])
            a = a + sum(scale * w[head, i] * torch.outer(u[head, i], u[head, i]) for i in range(9))
            expected = torch.stack([scale * w[head, i] * (x @ torch.linalg.inv(a) @ x) for i, x in enumerate(u[head])])
            assert float((found.scores[head] - expected).abs().max()) < 1e-10


@pytest.fixture
def poisoned():
    """Memory that is not written first holds NaN."""
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.utils.deterministic.fill_uninitialized_memory = before
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("tokens", "dim"), [(63, 64), (111, 80), (130, 65), (97, 127), (5, 128), (1, 64)])
@pytest.mark.parametrize("kv_heads", [1, 3, 6])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_halved_directions_in_either_precision(monkeypatch, poisoned, tokens, dim, kv_heads, dtype):
    monkeypatch.setattr(reference, "TILE_TOKENS", 50)
    g = torch.Generator().manual_seed(tokens + dim)
    u = torch.randn(kv_heads, tokens, dim, generator=g)
    w = torch.rand(6, tokens, generator=g, dtype=torch.float64)
    ridge = torch.rand(6, generator=g, dtype=torch.float64) + 2
    found = leverage_scores(u, w, ridge, 1e-3, dtype=dtype)
    assert found.scores.dtype == torch.float64
    for head in range(6):
        expected = dumb(u[head * kv_heads // 6].double(), w[head], float(ridge[head]), 1e-3)
        worst = float((found.scores[head] - expected).abs().max())
        assert worst < (1e-12 if dtype == torch.float64 else 3e-6)


@pytest.mark.parametrize("decades", [0, 3, 6, 10, 30])
def test_float32_is_left_where_it_would_not_do(decades):
    g = torch.Generator().manual_seed(decades)
    u = torch.randn(2, 90, 70, generator=g)
    w = 10 ** (decades * torch.rand(4, 90, generator=g, dtype=torch.float64))
    wide = leverage_scores(u, w, torch.ones(4))
    narrow = leverage_scores(u, w, torch.ones(4), dtype=torch.float32)
    assert float((narrow.scores - wide.scores).abs().max()) < 2e-5
    if decades >= 10:
        assert float((narrow.scores - wide.scores).abs().max()) < 1e-9


def test_weights_beyond_float32_are_scored_all_the_same():
    g = torch.Generator().manual_seed(9)
    u = torch.randn(1, 40, 66, generator=g)
    w = 1e39 * (1 + torch.rand(2, 40, generator=g, dtype=torch.float64))
    found = leverage_scores(u, w, torch.full((2,), 1e39, dtype=torch.float64), dtype=torch.float32)
    for head in range(2):
        assert float((found.scores[head] - dumb(u[0].double(), w[head] / 1e39, 1.0, 0.0)).abs().max()) < 1e-11


def test_grams_of_a_group_are_those_of_its_heads(poisoned):
    g = torch.Generator().manual_seed(10)
    u, w = torch.randn(77, 70, generator=g), torch.rand(3, 77, generator=g, dtype=torch.float64)
    found = reference.weighted_grams(u, w, torch.float64)
    for head in range(3):
        expected = sum(w[head, i] * torch.outer(x, x) for i, x in enumerate(u.double()))
        assert float((found[head] - expected).abs().max()) < 1e-12
    assert torch.equal(found, found.transpose(1, 2))
