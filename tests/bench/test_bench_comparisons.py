"""Both sides of every comparison find the same numbers: a ratio of two different things would mean nothing."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from kvtool.bench import decoding, scoring, splits, storage
from kvtool.bench.attention import agreeing
from kvtool.bench.cells import squared_errors
from kvtool.bench.plain_attention import (
    dense_outputs,
    gathered_errors,
    log_sum_exps,
    masked_errors,
    steps_errors,
)
from kvtool.bench.synthetic import Case, Heads, arrays, case, case_of, nested, orders
from kvtool.errors import KvtoolError
from kvtool.kernels.leverage import leverage_scores
from kvtool.trace.layout import layer_path

SMALL = Heads("small", 6, 2, 16)
RATIOS = (0.5, 0.7, 0.9)


def looped(made: Case, cells: torch.Tensor) -> torch.Tensor:
    """[C, H, R] by one softmax at a time, float64."""
    found = torch.zeros(len(cells), *made.queries.shape[:2], dtype=torch.float64)
    group = made.queries.shape[0] // made.keys.shape[0]
    for (c, leaves), h, r in itertools.product(enumerate(cells), *map(range, made.queries.shape[:2])):
        query, keys, values = (x.double() for x in (made.queries[h, r], made.keys[h // group], made.values[h // group]))
        outputs = []
        for kept in (torch.ones(len(keys), dtype=torch.bool), leaves[h // group] > made.tokens):
            outputs.append(torch.softmax(made.scale * keys[kept] @ query, 0) @ values[kept])
        found[c, h, r] = (outputs[0] - outputs[1]).square().sum()
    return found


def test_attention_comparisons_agree_with_a_loop_and_with_kvtool() -> None:
    made = case(SMALL, 111, 7)
    cells = nested(orders(made, 2), RATIOS, made.never)
    full, expected = dense_outputs(made), looped(made, cells)
    scale = float(expected.max())
    for found in (
        masked_errors(made, cells, full),
        gathered_errors(made, cells, full),
        squared_errors(made, cells, full, log_sum_exps(made, block=3)),
    ):
        assert float((found.double() - expected).abs().max()) < 1e-5 * scale
    assert scale > 0


def test_rankings_are_permutations_and_cells_are_nested_prefixes_with_sinks() -> None:
    made = case(SMALL, 200, 3)
    ranked = orders(made, 4)
    assert torch.equal(ranked.sort(2).values, torch.arange(200).expand(4, 2, -1))
    cells = nested(ranked, RATIOS, made.never).view(4, 3, 2, 200)
    kept = cells > made.tokens
    assert kept.sum(3).unique().tolist() == [20, 60, 100]
    assert bool((kept[:, 1:] <= kept[:, :-1]).all())
    assert bool(kept[:, :2, :, :4].all())
    assert not torch.equal(ranked[0], ranked[1])


def test_made_up_arrays_are_the_same_for_a_seed_and_have_a_sink() -> None:
    first, again, other = arrays(SMALL, 300, 20, 1), arrays(SMALL, 300, 20, 1), arrays(SMALL, 300, 20, 2)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])
    queries, keys, _ = first
    weights = ((queries.view(2, 60, 16) @ keys.transpose(1, 2)) * 16**-0.5).softmax(-1)
    assert float(weights[..., 0].mean()) > 20 / 300


def test_the_loop_over_decoding_steps_agrees_with_kvtool() -> None:
    tokens, every, budget = 96, 16, 40
    made, full = decoding.decode_case(tokens)
    cells = decoding.schedule(tokens, every, budget, 3)
    steps = torch.arange(budget, tokens)
    one = Case(made.queries[:, budget:].contiguous(), made.keys, made.values, made.scale)
    given = full[:, budget:].contiguous()
    mine = squared_errors(one, cells, given, log_sum_exps(one, steps), steps=steps)
    for cell, found in zip(cells, mine, strict=True):
        plain = steps_errors(one, cell, steps, given)
        assert float((plain.double() - found).abs().max()) < 1e-5 * float(found.max())
    assert float(mine.max()) > 0
    live = (cells[:, 0, :80] > 80).sum(1)  # right after the event before step 80
    assert live.tolist() == [budget] * 3


def test_solving_for_every_token_gives_the_leverage_scores() -> None:
    make = torch.Generator().manual_seed(0)
    u = torch.randn(2, 63, 8, generator=make, dtype=torch.float64)
    w = torch.rand(4, 63, generator=make, dtype=torch.float64)
    plain = scoring.solved_leverage(u, w, w.mean(1))
    assert float((plain - leverage_scores(u, w, w.mean(1)).scores).abs().max()) < 1e-12


def test_refactorising_picks_what_kvtool_picks() -> None:
    pool = scoring.greedy_pool(90, 12)
    x = pool.directions[0] * (pool.weights[0] / pool.ridge[0]).sqrt()[:, None]
    picks = scoring.refactorised_picks(x, 30)
    assert torch.equal(picks, scoring.greedy_picks(pool, 30))
    taken: list[int] = []
    for pick in picks[:6].tolist():
        best = max(
            (float(torch.logdet(torch.eye(12, dtype=torch.float64) + x[[*taken, i]].T @ x[[*taken, i]])), i)
            for i in range(90)
            if i not in taken
        )
        assert best[1] == pick
        taken.append(pick)


def test_all_subsets_at_once_agree_with_the_loop() -> None:
    make = torch.Generator().manual_seed(0)
    queries, keys, values = (torch.randn(n, 6, generator=make, dtype=torch.float64) for n in (5, 8, 8))
    every = splits.all_damages(queries, keys, values, 0.4)
    subsets = [[token for token in range(8) if number >> token & 1] for number in range(1, 256)]
    plain = scoring.looped_damages(0.4 * queries @ keys.T, values, subsets)
    assert float((every[1:] - plain).abs().max()) < 1e-9 * float(plain.max())
    assert abs(float(plain[-1])) < 1e-20  # the whole cache is no loss


def test_a_head_read_is_the_file(tmp_path) -> None:
    sequence = storage.write_heads(tmp_path / "heads.zarr", 40, 8, 2)
    file = tmp_path / "heads.zarr" / layer_path(0, 0) / "keys" / "c" / "1" / "0" / "0"
    assert np.array_equal(sequence.head("keys", 0, 1).numpy(), storage.mapped_copy(file, 40, 8))


def test_a_layer_becomes_a_case_whose_queries_come_after_its_keys() -> None:
    from pathlib import Path

    from kvtool.trace import open_trace

    trace = open_trace(Path(__file__).resolve().parents[2] / "sample_traces" / "tiny-gqa.zarr")
    layer = trace.sequences[0].layer(0)
    made = case_of(layer, 8)
    assert made.queries.shape[1] == 8
    assert made.tokens == int(layer.query_steps[-8])


def test_sides_that_differ_are_refused() -> None:
    same = torch.tensor([1.0, 2.0])
    agreeing(same, same.double(), "x")
    with pytest.raises(KvtoolError, match="x: both sides"):
        agreeing(same, torch.tensor([1.0, 2.1]), "x")
    with pytest.raises(KvtoolError):
        agreeing(torch.tensor([float("nan"), 2.0]), same, "x")
