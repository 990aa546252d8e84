"""What R-KV, LagKV and Scissorhands are known for, and their edges."""

import pytest
import torch

from kvtool.errors import KvtoolError
from kvtool.layer import Layer
from kvtool.policies import Protection, policy_from_text
from kvtool.policies.lagkv import spread
from kvtool.policies.r_kv import mean_cosines
from kvtool.selection import select
from kvtool.testing import example_layer, scores_at
from kvtool.view import View


def policy(text):
    return policy_from_text(text)[1]


def layer_of(queries, keys, values=None, **options):
    """One head; [T, D] each."""
    values = torch.randn(len(keys), 4, generator=torch.Generator().manual_seed(0)) if values is None else values
    return Layer.from_arrays(
        queries[None], keys[None], values[None], prompt_length=len(keys) - 1, scale=1.0, rotation="none", **options
    )


def test_protection_is_that_of_the_papers():
    assert policy("r-kv").protection(100) == Protection(window=8)
    assert policy("lagkv").protection(100) == Protection(sinks=4)
    assert policy("scissorhands").protection(100) == Protection(window=10)
    assert [policy("scissorhands").queries_back(e) for e in (20, 1000)] == [20, 400]
    assert [policy("r-kv").queries_back(e) for e in (5, 1000)] == [5, 8]
    assert policy("lagkv").queries_back(1000) == 0


@pytest.mark.parametrize("text", ["lagkv:lag=7", "scissorhands:history=9", "r-kv", "h2o", "capacity:statistics=ema"])
def test_scoring_leaves_the_state_alone_and_other_token_lists_are_served(text):
    layer, chosen = example_layer(dtype=torch.float64), policy(text)
    state = chosen.observe(chosen.start(layer.geometry), View.at(layer, 40).past())
    whole = chosen.score(state, View.at(layer, 40))
    half = View.at(layer, 40).tokens[:, ::2].contiguous()
    few = chosen.score(state, View(layer, 40, half, 40, torch.full_like(half, layer.tokens)))
    assert few.shape == half.shape
    if text.startswith(("lagkv", "scissorhands", "h2o")):  # their scores are in the state
        assert torch.equal(few, whole[:, ::2])
    assert torch.equal(chosen.score(state, View.at(layer, 40)), whole)


# LagKV


def test_lagkv_takes_the_same_share_of_every_judged_partition():
    layer = example_layer(200, seed=3)
    chosen = policy("lagkv:sinks=4,lag=20")
    tokens = View.at(layer, 190).tokens
    scores = scores_at(chosen, layer, 190)
    found = select(scores, tokens, [110, 110], sinks=4, window=0, step=190)  # 80 of 160 judged tokens go
    for head in range(2):
        kept = tokens[head][found.keep[head]]
        counts = [int(((kept >= 4 + 20 * p) & (kept < 24 + 20 * p)).sum()) for p in range(9)]
        assert counts == [10] * 8 + [20]  # the last partition has no reference yet
        assert int((kept >= 184).sum()) == 6
        assert int((kept < 4).sum()) == 4


def test_lagkv_keeps_its_judgement_at_later_events():
    layer, chosen = example_layer(60, dtype=torch.float64), policy("lagkv:sinks=2,lag=5")
    first = chosen.observe(chosen.start(layer.geometry), View.at(layer, 30).past())
    before = chosen.score(first, View.at(layer, 30))
    survivors = torch.tensor([0, 1, 3, 8, 15, 20, *range(22, 50)]).expand(2, -1)
    never = torch.full_like(survivors, layer.tokens)
    second = chosen.observe(first, View(layer, 50, survivors, 30, never))
    after = chosen.score(second, View(layer, 50, survivors, 50, never))
    assert torch.equal(after[:, 2:6], before[:, [3, 8, 15, 20]])  # neither with fewer neighbours nor anew
    assert bool((after[:, 2:6] < 1).all())
    assert bool((after[:, 6:26] < 1).all())  # partitions 22..41 had no judgement at the first event or got it since
    assert after[0, 26:].tolist() == [2.0 + i for i in range(42, 50)]


def test_lagkv_judges_by_what_is_left_where_an_event_was_early():
    """Of the partition only rows 3 and 4 are left, of its reference row 9 alone: no channel has a range, the newer
    row wins."""
    layer, chosen = example_layer(20, dtype=torch.float64), policy("lagkv:sinks=0,lag=5")
    state = chosen.observe(chosen.start(layer.geometry), View.at(layer, 9).past())
    rows = torch.tensor([3, 4, 9]).expand(2, -1)
    never = torch.full_like(rows, layer.tokens)
    state = chosen.observe(state, View(layer, 10, rows, 9, never))
    assert chosen.score(state, View(layer, 10, rows, 10, never)).tolist() == [[0.0, 0.5, 11.0]] * 2


def test_lagkv_without_two_partitions_keeps_the_newest():
    layer = example_layer(48)
    assert scores_at(policy("lagkv"), layer, 40).tolist() == [[2.0 + i for i in range(40)]] * 2


def test_a_channel_that_is_constant_over_the_reference_is_left_out():
    generator = torch.Generator().manual_seed(1)
    tokens, reference = (torch.randn(n, 5, generator=generator, dtype=torch.float64) for n in (6, 4))
    reference[:, 2] = 0.25
    without = [0, 1, 3, 4]
    assert torch.equal(spread(tokens, reference), spread(tokens[:, without], reference[:, without]))
    assert bool(spread(tokens, reference).isfinite().all())
    assert spread(tokens, reference[:1]).tolist() == [0.0] * 6
    assert spread(tokens[:, :1], reference[:, :1]).tolist() == [0.0] * 6


# Scissorhands


def test_an_even_share_is_not_passed_over_and_the_ignored_go():
    keys = torch.zeros(30, 4)
    even = scores_at(policy("scissorhands"), layer_of(torch.ones(30, 4), keys), 25)
    assert even.tolist() == [[0.0] * 25]
    keys[7] = -9.0
    scores = scores_at(policy("scissorhands"), layer_of(torch.ones(30, 4), keys), 25)[0]
    assert float(scores[7]) == -18.0  # steps 7..24, its own query included
    assert scores.tolist().count(0.0) == 24


def test_young_tokens_have_had_fewer_chances():
    keys = torch.zeros(30, 4)
    keys[2:] = -1.0
    scores = scores_at(policy("scissorhands"), layer_of(torch.ones(30, 4), keys), 25)[0]
    assert scores[2:].tolist() == [-float(25 - i) for i in range(2, 25)]
    assert scores_at(policy("scissorhands:history=5"), layer_of(torch.ones(30, 4), keys), 25)[0, 2:].tolist() == [
        -5.0 + max(0, i - 20) for i in range(2, 25)
    ]


def test_scissorhands_remembers_its_history_only():
    layer = example_layer(300, query_heads=4, kv_heads=2)
    chosen = policy("scissorhands:history=12")
    state = chosen.observe(chosen.start(layer.geometry), View.at(layer, 290).past())
    assert state.heads.shape == (2, 12, 290)
    assert state.heads.dtype == torch.uint8


# R-KV


def test_the_newest_of_near_duplicates_is_spared():
    """Keys 3, 9 and 14 are one and the same; the others are as different as they can be."""
    keys = torch.eye(20, dtype=torch.float64)
    keys[9] = keys[14] = keys[3]
    means = mean_cosines(keys, 0.5)
    assert means.nonzero()[:, 0].tolist() == [3, 9]  # 3 pays for 9 and 14, 9 for 3, and 14 for neither
    assert means[[3, 9]].tolist() == [2 / 20, 1 / 20]
    layer = layer_of(torch.zeros(20, 20, dtype=torch.float64), keys, dtype=torch.float64)
    scores = scores_at(policy("r-kv:balance=0,window=2"), layer, 18)[0]
    assert scores.argsort()[:2].sort().values.tolist() == [3, 9]


def test_where_nothing_is_similar_nothing_is_spared():
    keys = torch.tensor([[1.0, 0.0], [0.9, 0.5], [-0.2, 1.0]], dtype=torch.float64)
    unit = keys / keys.norm(dim=1, keepdim=True)
    cosines = unit @ unit.T - torch.eye(3, dtype=torch.float64)
    assert torch.allclose(mean_cosines(keys, 0.99), cosines.mean(0), rtol=0, atol=1e-15)  # token 0 pays too
    assert float(cosines.mean(0)[0]) != 0.0


def test_redundancy_does_not_depend_on_the_block():
    keys = torch.randn(70, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    whole = mean_cosines(keys, 0.3, block=70)
    assert all(torch.allclose(mean_cosines(keys, 0.3, block=b), whole, rtol=0, atol=1e-15) for b in (1, 7, 64))


def test_a_key_of_length_zero_is_like_no_other():
    keys = torch.randn(9, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    keys[4] = 0.0
    assert float(mean_cosines(keys, 0.5)[4]) == 0.0
    assert bool(mean_cosines(keys, 0.5).isfinite().all())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("r-kv:kernel=4", "odd"),
        ("r-kv:balance=2", "0..1"),
        ("r-kv:group=sum", "max, mean"),
        ("lagkv:lag=0", "at least 1"),
        ("scissorhands:history=0", "at least 1"),
    ],
)
def test_nonsense_is_refused(text, words):
    with pytest.raises(KvtoolError, match=words):
        policy(text)
