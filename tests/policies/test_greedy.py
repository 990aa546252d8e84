"""Greedy growth against factorising anew at every pick."""

import math

import pytest
import torch

from kvtool.policies import greedy
from kvtool.policies.greedy import grow


def refactorised(x, held, count, reducer):
    """Picks and gains: at every pick one matrix per head from nothing, one solve per token."""
    inside, picks, gains = held.nonzero()[:, 0].tolist(), [], []
    for _ in range(count):
        best = (-math.inf, -1)
        factors = [torch.linalg.cholesky(torch.eye(own.shape[1]) + own[inside].T @ own[inside]) for own in x]
        for token in range(x.shape[1]):
            if token in inside:
                continue
            each = []
            for own, factor in zip(x, factors, strict=True):
                y = torch.linalg.solve_triangular(factor, own[token, :, None], upper=False)
                each.append(0.5 * math.log1p(float(y.square().sum())))
            gain = max(each) if reducer == "max" else sum(each) / (len(each) if reducer == "mean" else 1)
            if gain >= best[0] * (1 - 1e-9):
                best = (max(gain, best[0]), token)  # of equals the newest
        inside.append(best[1])
        picks.append(best[1])
        gains.append(best[0])
    return picks, gains


def whitened(x, held):
    """What `grow` is given: x against the held tokens."""
    out = x.clone()
    for head, own in enumerate(x):
        factor = torch.linalg.cholesky(torch.eye(own.shape[1]) + own[held].T @ own[held])
        out[head] = torch.linalg.solve_triangular(factor, own.T, upper=False).T
    return out


@pytest.fixture(autouse=True)
def wide():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("reducer", ["mean", "max", "sum"])
@pytest.mark.parametrize(("group", "tokens", "width"), [(1, 41, 7), (3, 33, 12), (2, 20, 40)])
@pytest.mark.parametrize(("candidates", "far"), [(1, 1e4), (3, 1e4), (256, 1e4), (256, 0.0), (5, 3.0)])
@pytest.mark.parametrize("size", [0.1, 1.0, 100.0])
def test_picks_are_those_of_factorising_anew(monkeypatch, reducer, group, tokens, width, candidates, far, size):
    monkeypatch.setattr(greedy, "CANDIDATES", candidates)
    monkeypatch.setattr(greedy, "FAR", far)
    g = torch.Generator().manual_seed(tokens)
    x = size * torch.randn(group, tokens, width, generator=g) * torch.rand(1, tokens, 1, generator=g)
    held = torch.zeros(tokens, dtype=torch.bool)
    held[[0, 5, tokens - 1]] = True
    count = 13
    picks, gains = refactorised(x, held, count, reducer)
    scores = grow(whitened(x, held), held, count, reducer)
    assert scores[held].tolist() == [math.inf] * 3
    order = scores.masked_fill(held, -1).argsort(descending=True)
    assert order[:count].tolist() == picks
    assert scores[picks].tolist() == pytest.approx(gains, rel=1e-9)
    assert bool((scores[picks].diff() <= 0).all())
    others = [i for i in range(tokens) if not held[i] and i not in picks]
    assert float(scores[others].max()) < float(scores[picks[-1]])


@pytest.mark.parametrize("candidates", [2, 256])
def test_the_others_keep_what_they_would_still_add(monkeypatch, candidates):
    monkeypatch.setattr(greedy, "CANDIDATES", candidates)
    x = torch.randn(2, 19, 6, generator=torch.Generator().manual_seed(3))
    held = torch.zeros(19, dtype=torch.bool)
    scores = grow(x.clone(), held, 8, "mean")
    chosen = scores.argsort(descending=True)[:8].tolist()
    for token in set(range(19)) - set(chosen):
        gains = []
        for own in x:
            rows = torch.eye(6) + own[chosen].T @ own[chosen]
            gains.append(0.5 * math.log1p(float(own[token] @ torch.linalg.inv(rows) @ own[token])))
        expected = min(sum(gains) / 2, float(scores[chosen[-1]]))
        assert float(scores[token]) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("candidates", [1, 2, 256])
@pytest.mark.parametrize("size", [0.3, 1e4])
def test_of_equal_gains_the_newest_goes_first(monkeypatch, candidates, size):
    monkeypatch.setattr(greedy, "CANDIDATES", candidates)
    unit = torch.eye(4) * size
    x = torch.cat([unit, unit, unit])[None]  # the same four directions three times over
    order = grow(x, torch.zeros(12, dtype=torch.bool), 4, "mean").argsort(descending=True)
    assert sorted(order[:4].tolist()) == [8, 9, 10, 11]


@pytest.mark.parametrize("decades", [3, 8, 14])
def test_gains_over_many_orders_of_magnitude(decades):
    """Orthogonal directions do not touch one another: the gains are known exactly."""
    sizes = 10 ** torch.linspace(decades / 2, -3, 24)
    x = torch.diag(sizes)[None]
    scores = grow(x, torch.zeros(24, dtype=torch.bool), 24, "mean")
    assert scores.tolist() == pytest.approx((0.5 * sizes.square().log1p()).tolist(), rel=1e-9)


def test_a_copy_of_a_huge_token_adds_what_is_left():
    """ln sqrt(1 + l / (1 + l)) of l = 1e12: as a difference it would be noise."""
    x = torch.zeros(1, 5, 3)
    x[0, :2, 0], x[0, 2, 1], x[0, 3, 2], x[0, 4, 1] = 1e6, 1e-3, 0.5, 2e-3
    scores = grow(x, torch.zeros(5, dtype=torch.bool), 5, "mean")
    assert scores.argsort(descending=True).tolist() == [1, 0, 3, 4, 2]
    assert scores[:2].tolist() == pytest.approx([0.5 * math.log(2), 0.5 * math.log1p(1e12)], rel=1e-9)
    assert scores[3:].tolist() == pytest.approx([0.5 * math.log1p(0.25), 0.5 * math.log1p(4e-6)], rel=1e-9)


def test_everything_taken_and_nothing_taken():
    x = torch.randn(2, 6, 3, generator=torch.Generator().manual_seed(1))
    held = torch.tensor([True, False, False, True, False, False])
    assert bool(grow(x.clone(), held, 4, "mean").isfinite().eq(~held).all())
    still = grow(x.clone(), held, 0, "mean")
    assert still[~held].tolist() == pytest.approx((0.5 * x.square().sum(2).log1p()).mean(0)[~held].tolist())


@pytest.mark.parametrize("reducer", ["mean", "max"])
def test_of_two_equal_tokens_the_newer_is_picked_first(reducer):
    generator = torch.Generator().manual_seed(3)
    for half, width in ((10, 3), (10, 16), (60, 16), (60, 40)) * 5:
        x = torch.randn(4, half, width, generator=generator, dtype=torch.float64).repeat(1, 2, 1)
        scores = grow(x, torch.zeros(2 * half, dtype=torch.bool), half // 2, reducer)

        assert bool((scores[half:] >= scores[:half]).all())
