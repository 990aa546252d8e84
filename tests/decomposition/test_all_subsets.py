"""Damages of all subsets by split masks against a softmax per subset and query."""

import math

import pytest
import torch

from kvtool.decomposition import damage as damage_file
from kvtool.decomposition import split_masks
from kvtool.decomposition.all_subsets import masks, subset_damages
from kvtool.decomposition.damage import Damage
from kvtool.decomposition.ladder import damages
from kvtool.decomposition.search import subsets
from kvtool.decomposition.subpools import SubPool
from kvtool.errors import KvtoolError

F64 = torch.float64


def sub_pool(tokens, queries, heads=1, dim=5, width=3, softcap=None, sinks=False, seed=0):
    g = torch.Generator().manual_seed(seed)

    def noise(*shape):
        return torch.randn(*shape, generator=g, dtype=F64)

    covariance = torch.eye(dim, dtype=F64).expand(heads, -1, -1)
    sink_logits = noise(heads) if sinks else None
    q, k, v, mean = noise(heads, queries, dim), noise(tokens, dim), noise(tokens, width), noise(heads, dim)
    rows = torch.arange(tokens)
    return SubPool(q, k, v, rows, 0.7, softcap, sink_logits, mean, covariance, None, torch.arange(1))


def one(pool, kept):
    """The damage of one subset, a list of indices: a softmax for every query of every head."""
    total = 0.0
    for head in range(pool.heads):
        for query in pool.queries[head]:
            outputs = []
            for some in (range(pool.tokens), kept):
                below, output = 0.0, torch.zeros(pool.values.shape[1], dtype=F64)
                if pool.sink_logits is not None:
                    below = math.exp(float(pool.sink_logits[head]))
                for i in some:
                    z = pool.scale * float(query @ pool.keys[i])
                    z = z if pool.softcap is None else pool.softcap * math.tanh(z / pool.softcap)
                    below += math.exp(z)
                    output = output + math.exp(z) * pool.values[i]
                outputs.append(output / below if below else output)
            total += float((outputs[0] - outputs[1]).square().sum())
    return total


@pytest.mark.parametrize("tokens", [1, 2, 5, 6])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize(("softcap", "sinks"), [(None, False), (None, True), (1.5, True)])
@pytest.mark.parametrize("tile", [1, 7, 1 << 17])
def test_every_subset_has_the_damage_of_its_own_softmax(monkeypatch, tokens, heads, softcap, sinks, tile):
    monkeypatch.setattr(split_masks, "TILE_NUMBERS", tile)
    pool = sub_pool(tokens, 3, heads, softcap=softcap, sinks=sinks, seed=tokens)
    found = subset_damages(pool)
    assert found.shape == (1 << tokens,)
    for number in range(1 << tokens):
        kept = [i for i in range(tokens) if number >> i & 1]
        if kept or sinks:
            assert float(found[number]) == pytest.approx(one(pool, kept), rel=1e-9, abs=1e-12)
        else:
            assert float(found[number]) == math.inf


def test_the_masks_are_the_numbers_in_binary():
    assert masks(3).int().tolist() == [[n & 1, n >> 1 & 1, n >> 2 & 1] for n in range(8)]


def test_subsets_of_one_size_are_those_that_the_search_bounds():
    pool = sub_pool(9, 11, 3, sinks=True)
    every, sets = subset_damages(pool), subsets(9, 4)
    numbers = (1 << sets.long()).sum(1)
    assert float((every[numbers] - Damage(pool).bounds(4)).abs().max()) < 1e-9


def test_too_many_tokens_are_refused():
    with pytest.raises(KvtoolError, match="33,554,432"):
        subset_damages(sub_pool(25, 1))


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("chunk", [1, 4, 256])
def test_what_is_not_followed_is_above_the_limit(monkeypatch, sinks, chunk):
    monkeypatch.setattr(damage_file, "CHUNK", chunk)
    pool = sub_pool(8, 13, 2, sinks=sinks, seed=4)
    damage = Damage(pool)
    whole = damage.of(subsets(8, 3))[0]
    for limit in (0.0, float(whole.min()), float(whole.median()), math.inf):
        bounds = damage.bounds(3, limit)
        assert bool((bounds <= whole * (1 + 1e-12)).all())
        followed = whole <= limit
        assert float((bounds - whole)[followed].abs().max() if followed.any() else 0.0) < 1e-9
        assert bool((bounds[~followed] > limit).all())


@pytest.mark.parametrize("chunk", [1, 256])
def test_the_best_is_the_best_of_all(monkeypatch, chunk):
    monkeypatch.setattr(damage_file, "CHUNK", chunk)
    for seed in range(6):
        pool = sub_pool(9, 7, 2, sinks=seed % 2 == 0, seed=seed)
        best = damages(pool, 4).best
        each = [one(pool, kept.tolist()) for kept in subsets(9, 4)]
        assert best.number == each.index(min(each))
        assert best.value == pytest.approx(min(each), rel=1e-9)
