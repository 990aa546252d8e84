"""Each construction has the structure that it claims, from the definition of attention, in every head and layer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kvtool.layer import Layer
from kvtool.trace import Trace


def heads(trace: Trace) -> Iterator[tuple[Layer, int]]:
    sequence = trace.sequences[0]
    for layer_id in sequence.layer_ids:
        layer = sequence.layer(layer_id, dtype=torch.float64)
        for head in range(layer.geometry.query_heads):
            yield layer, head


@pytest.fixture
def share(weights):
    """layer, head, step, rows -> their attention together."""
    return lambda layer, head, step, rows: sum(weights(layer, head, step)[row] for row in rows)


def test_the_prefix_is_avoided_until_the_end(built, seed, share):
    trace = built("delayed-constraint", seed)
    prefix = trace.sequences[0].landmarks["prefix"]
    assert prefix == list(range(4, 36))
    for layer, head in heads(trace):
        assert all(share(layer, head, step, prefix) < 0.002 for step in (40, 200, 511, 575))
        assert all(share(layer, head, step, prefix) == pytest.approx(0.8, abs=2e-3) for step in (576, 639))


def test_only_late_queries_want_the_needle(built, seed, share):
    """Nobody in the prompt gives it or its neighbours anything, so that no pooling finds it either."""
    trace = built("needle", seed)
    (row,) = trace.sequences[0].landmarks["needle"]
    assert row == round(0.5 * 511)
    for layer, head in heads(trace):
        assert all(share(layer, head, step, list(range(row - 4, row + 5))) < 1e-3 for step in (400, 511, 575))
        assert all(share(layer, head, step, [row]) == pytest.approx(0.9, abs=2e-3) for step in (576, 639))


def test_the_needles_key_is_unusual_and_long(built, seed):
    trace = built("needle", seed)
    (row,) = trace.sequences[0].landmarks["needle"]
    for layer, _ in heads(trace):
        keys = layer.keys[:, :512]
        unit = keys / keys.norm(dim=-1, keepdim=True)
        cosine = (unit * unit.mean(1, keepdim=True)).sum(-1)  # [Hk, N], to the mean direction up to its length
        assert bool((cosine[:, row] < cosine.median(1).values - 0.3).all())
        assert bool((keys[:, row].norm(dim=-1) > keys.norm(dim=-1).median(1).values).all())


def test_the_evidence_balances(built, seed, share):
    trace = built("competing-evidence", seed)
    marks = trace.sequences[0].landmarks
    (yes,), (no,) = marks["yes"], marks["no"]
    for layer, head in heads(trace):
        keys, values = layer.keys[head // 2], layer.values[head // 2]
        for step, first in ((512, 0.45), (513, 0.35), (639, 0.35)):
            assert share(layer, head, step, [yes]) == pytest.approx(first, abs=2e-3)
            assert share(layer, head, step, [no]) == pytest.approx(0.8 - first, abs=2e-3)
        assert share(layer, head, 500, [yes]) > 0.25
        assert share(layer, head, 500, [no]) < 1e-4
        # keys turn with their positions in the first half of the channels only: these two are not turned at all
        assert float(torch.cosine_similarity(keys[yes], keys[no], dim=0)) > 0.95
        assert float(torch.cosine_similarity(values[yes], values[no], dim=0)) < -0.98


def test_attention_jumps_from_one_passage_to_the_other(built, seed, share):
    trace = built("phase-shift", seed)
    marks = trace.sequences[0].landmarks
    for layer, head in heads(trace):
        for step in (320, 447):
            assert share(layer, head, step, marks["before"]) == pytest.approx(0.7, abs=2e-3)
            assert share(layer, head, step, marks["after"]) < 1e-3
        for step in (448, 511, 639):
            assert share(layer, head, step, marks["after"]) == pytest.approx(0.7, abs=2e-3)
            assert share(layer, head, step, marks["before"]) < 1e-3


def test_the_saturated_token_does_not_respond(built, seed, weights):
    """Its weight is above 0.97 and its derivative below 0.03 at every step, and its logit is the same for all."""
    trace = built("saturated-token", seed)
    (row,) = trace.sequences[0].landmarks["saturated"]
    for layer, head in heads(trace):
        logits = layer.queries[head, row:] @ layer.keys[head // 2, row] * layer.geometry.scale
        assert float(logits.max() - logits.min()) < 1e-5
        for step in (row + 1, 100, 511, 639):
            attention = weights(layer, head, step)[row]
            assert attention >= 0.9695
            assert attention * (1 - attention) < 0.03


def test_the_sink_takes_sixty_percent_and_brings_nothing(built, seed, share):
    trace = built("heavy-sink", seed)
    for layer, head in heads(trace):
        for step in (5, 100, 512, 639):
            assert share(layer, head, step, [0]) == pytest.approx(0.6, abs=2e-3)
        values = layer.values[head // 2].norm(dim=-1)
        assert float(values[0]) < 0.05 * float(values.median())


def test_the_rare_direction_is_held_once_and_ranked_behind_the_crowd(built, seed, share, weights):
    trace = built("redundant-values", seed)
    (row,) = trace.sequences[0].landmarks["rare"]
    for layer, head in heads(trace):
        values = layer.values[head // 2, :512]
        crowd = [r for r in range(8, 512) if r != row and float(values[r, 0]) > 1.0]
        assert len(crowd) > 200
        assert float(values[row, 1]) > 3.0
        assert max(float(values[r, 1].abs()) for r in range(4, 512) if r != row) < 1.0
        found = [0.0] * 512
        for step in range(480, 512, 8):
            for r, weight in enumerate(weights(layer, head, step)):
                found[r] += weight
        assert sum(found[r] > found[row] for r in crowd) > 128  # more than the budget at ratio 0.75
        assert share(layer, head, 600, [row]) == pytest.approx(0.5, abs=2e-3)
