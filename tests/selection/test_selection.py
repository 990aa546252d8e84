"""Selection: order, ties, protection, exact counts."""

import math

import pytest
import torch

from kvtool.errors import KvtoolError
from kvtool.selection import NaNScore, cut, rank, select


def dumb_keep(scores, rows, budget, sinks, window, step):
    """One head, plain Python: the rule as it is written in the docs."""

    def place(i):
        row = rows[i]
        if row < sinks:
            return (0, row)
        if row >= step - window:
            return (1, -row)
        return (2, -scores[i], -row)

    order = sorted(range(len(rows)), key=place)
    return sorted(rows[i] for i in order[:budget]), order


def kept_rows(selection, tokens, head=0):
    return tokens[head][selection.keep[head]].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("step", [1, 7, 40, 63])
def test_equals_the_written_rule_on_scores_full_of_ties(step, dtype):
    generator = torch.Generator().manual_seed(step)
    for trial in range(60):
        scores = torch.randint(-2, 3, (3, step), generator=generator).to(dtype)
        sinks, window = (int(n) for n in torch.randint(0, 6, (2,), generator=generator))
        gaps = torch.randint(1, 3, (3, step), generator=generator).cumsum(1) - 1
        now = int(gaps.max()) + 1
        budget = trial % (step + 2)
        chosen = select(scores, gaps, [budget] * 3, sinks=sinks, window=window, step=now)
        for head in range(3):
            expected, order = dumb_keep(scores[head].tolist(), gaps[head].tolist(), budget, sinks, window, now)
            assert kept_rows(chosen, gaps, head) == expected
            assert chosen.ranking[head][torch.tensor(order)].tolist() == list(range(1, step + 1))
            assert int(chosen.keep[head].sum()) == int(chosen.achieved[head]) == min(budget, step)


def test_all_equal_scores_keep_exactly_the_budget_and_the_newest():
    tokens = torch.arange(16).expand(2, -1)
    chosen = select(torch.ones(2, 16), tokens, [4, 4], sinks=0, window=0, step=16)
    assert [kept_rows(chosen, tokens, h) for h in range(2)] == [[12, 13, 14, 15]] * 2
    assert chosen.ties.tolist() == [16, 16]
    assert chosen.margin.tolist() == [0.0, 0.0]


def test_ties_count_only_tokens_that_the_cut_divided():
    tokens = torch.arange(6)[None]
    scores = torch.tensor([[3.0, 1.0, 1.0, 1.0, 0.0, 3.0]])
    divided = select(scores, tokens, [3], sinks=0, window=0, step=6)
    assert (int(divided.ties[0]), kept_rows(divided, tokens)) == (3, [0, 3, 5])
    clean = select(scores, tokens, [2], sinks=0, window=0, step=6)
    assert (int(clean.ties[0]), float(clean.margin[0])) == (0, 2.0)
    protected = select(scores, tokens, [3], sinks=0, window=3, step=6)  # row 3 is protected: no tie decides
    assert int(protected.ties[0]) == 0


def test_bfloat16_scores_tie_and_the_newer_token_wins():
    values = torch.linspace(0.5, 1.0, 4096).to(torch.bfloat16).to(torch.float32)[None]
    tokens = torch.arange(4096)[None]
    chosen = select(values, tokens, [1024], sinks=0, window=0, step=4096)
    assert kept_rows(chosen, tokens) == list(range(3072, 4096))
    assert int(chosen.keep.sum()) == 1024


def test_negative_zero_equals_zero():
    tokens = torch.arange(4)[None]
    chosen = select(torch.tensor([[0.0, -0.0, 0.0, -0.0]]), tokens, [2], sinks=0, window=0, step=4)
    assert kept_rows(chosen, tokens) == [2, 3]
    assert int(chosen.ties[0]) == 4


def test_infinite_scores_are_ordinary_scores():
    inf = math.inf
    tokens = torch.arange(5)[None]
    scores = torch.tensor([[-inf, inf, 0.0, inf, -inf]])
    chosen = select(scores, tokens, [1], sinks=0, window=0, step=5)
    assert (kept_rows(chosen, tokens), int(chosen.ties[0]), float(chosen.margin[0])) == ([3], 2, 0.0)
    assert float(select(scores, tokens, [2], sinks=0, window=0, step=5).margin[0]) == inf
    evicted_sink = select(scores, tokens, [3], sinks=1, window=0, step=5)
    assert kept_rows(evicted_sink, tokens) == [0, 1, 3]  # protection is a mask: -inf does not undo it


def test_nan_is_refused_and_named():
    scores = torch.zeros(2, 4)
    scores[1, 2] = math.nan
    with pytest.raises(NaNScore) as caught:
        select(scores, torch.tensor([[3, 5, 8, 9]] * 2), [2, 2], sinks=0, window=0, step=10)
    assert (caught.value.head, caught.value.row) == (1, 8)


@pytest.mark.parametrize(
    ("budget", "expected", "overfull"),
    [(1, [0], True), (2, [0, 1], True), (3, [0, 1, 9], True), (4, [0, 1, 8, 9], True), (5, [0, 1, 7, 8, 9], False)],
)
def test_protection_beyond_the_budget_keeps_sinks_then_newest(budget, expected, overfull):
    tokens = torch.arange(10)[None]
    scores = torch.zeros(1, 10)
    scores[0, 4] = 100.0
    chosen = select(scores, tokens, [budget], sinks=2, window=3, step=10)
    assert (kept_rows(chosen, tokens), chosen.overfull) == (expected, overfull)
    assert math.isnan(float(chosen.margin[0]))


def test_a_sink_that_is_no_candidate_is_not_replaced():
    tokens = torch.arange(3, 11)[None]
    scores = torch.tensor([[0.0, 0.0, 9.0, 8.0, 7.0, 0.0, 0.0, 0.0]])
    chosen = select(scores, tokens, [3], sinks=4, window=0, step=11)
    assert kept_rows(chosen, tokens) == [3, 5, 6]  # row 3 is the one sink left; rows 4.. do not move up


def test_window_of_zero_protects_nothing_and_huge_ones_everything():
    tokens = torch.arange(6)[None]
    scores = torch.arange(6.0).flip(0)[None]
    assert kept_rows(select(scores, tokens, [2], sinks=0, window=0, step=6), tokens) == [0, 1]
    assert kept_rows(select(scores, tokens, [2], sinks=0, window=99, step=6), tokens) == [4, 5]
    assert kept_rows(select(scores, tokens, [2], sinks=99, window=99, step=6), tokens) == [0, 1]


def test_one_ranking_serves_many_ragged_budgets():
    scores = torch.randn(2, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    tokens = torch.arange(20).expand(2, -1)
    shared = rank(scores, tokens, sinks=2, window=3, step=20)
    previous = torch.zeros(2, 20, dtype=torch.bool)
    for budget in range(21):
        chosen = cut(shared, [budget, 20 - budget])
        alone = select(scores, tokens, [budget, 20 - budget], sinks=2, window=3, step=20)
        assert torch.equal(chosen.keep, alone.keep)
        assert chosen.achieved.tolist() == [budget, 20 - budget]
        assert bool((chosen.keep[0] | ~previous[0]).all())  # nested
        previous = chosen.keep


def test_budget_above_the_candidates_keeps_all():
    tokens = torch.arange(5)[None]
    chosen = select(torch.zeros(1, 5), tokens, [50], sinks=0, window=0, step=5)
    assert bool(chosen.keep.all())
    assert (chosen.achieved.tolist(), chosen.ties.tolist(), chosen.overfull) == ([5], [0], False)


def test_wrong_budgets_are_refused():
    tokens = torch.arange(5).expand(2, -1)
    for budgets in ([1], [1, -1]):
        with pytest.raises(KvtoolError, match="do not fit"):
            select(torch.zeros(2, 5), tokens, budgets, sinks=0, window=0, step=5)
