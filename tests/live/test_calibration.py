"""Predicted against measured: correlations and pairs by hand."""

from __future__ import annotations

import math

import pytest
import torch

from kvtool.live.calibration import agreement, calibrate, pearson, predictors, ranks, spearman
from kvtool.live.measures import compare


def cell(policy, ratio, predicted, measured, sequence=None, answer=None, targets=None):
    return {
        "sequence": sequence,
        "policy": policy,
        "ratio": ratio,
        "budget": None,
        "predicted_kl": predicted,
        "predicted_kl_w32": None if predicted is None else 2 * predicted,
        "predicted_kl_se": 1.0,
        "mean_layer_error": 0.1,
        "mean_output_error": 0.1,
        "measured_kl": measured,
        "measured_kl_targets": targets,
        "answer_loss": answer,
    }


def test_ranks_share_ties():
    assert ranks([3.0, 1.0, 3.0, 2.0, 3.0]) == [4.0, 1.0, 4.0, 2.0, 4.0]


def test_spearman_of_a_textbook_case():
    """One swap among five: 1 - 6·2 / (5·24)."""
    assert spearman([1, 2, 3, 4, 5], [10, 20, 40, 30, 50]) == pytest.approx(0.9, abs=1e-12)
    assert spearman([1, 2, 3], [9, 4, 1]) == pytest.approx(-1.0, abs=1e-12)
    assert spearman([1, 1, 1], [1, 2, 3]) is None
    assert pearson([1, 2], [1, 2]) is None


def test_agreement_by_hand():
    cells = [
        cell("a", 0.5, 0.1, 0.2),
        cell("b", 0.5, 0.2, 0.1),
        cell("c", 0.5, 0.4, 0.4),
        cell("a", 0.9, 0.8, 0.8),
        cell("b", 0.9, 1.6, 3.2),
        cell("c", 0.9, 0.0, 0.9),
    ]
    found = agreement(cells, "predicted_kl", "measured_kl")
    assert found["cells"] == 6
    assert (found["ratio_low"], found["ratio_median"], found["ratio_high"]) == (0.5, 1.0, 2.0)
    assert found["pairs"] == 6
    assert found["wrong_pairs"] == [
        "ratio 0.5: a before b, measured 0.2 and 0.1",
        "ratio 0.9: c before a, measured 0.9 and 0.8",
    ]
    x = [math.log(v) for v in (0.1, 0.2, 0.4, 0.8, 1.6)]
    y = [math.log(v) for v in (0.2, 0.1, 0.4, 0.8, 3.2)]
    mx, my = sum(x) / 5, sum(y) / 5
    top = sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True))
    bottom = math.sqrt(sum((a - mx) ** 2 for a in x) * sum((b - my) ** 2 for b in y))
    assert found["log_pearson"] == pytest.approx(top / bottom, rel=1e-12)
    assert agreement(cells, "mean_layer_error", "measured_kl")["ratio_median"] is None


def test_full_and_unpredicted_cells_are_left_out_and_targets_preferred():
    assert predictors(cell("a", 0.5, 1.0, 1.0)) == [
        "predicted_kl",
        "predicted_kl_w32",
        "mean_layer_error",
        "mean_output_error",
    ]
    cells = [cell("full", 0.5, 0.0, 0.0), cell("a", 0.5, None, 1.0), cell("b", 0.5, 2.0, 1.0)]
    found = {(e["predictor"], e["measured"]): e["cells"] for e in calibrate(cells)}
    assert found["predicted_kl", "measured_kl"] == 1
    assert found["mean_layer_error", "measured_kl"] == 2
    cells = [cell("a", 0.5, 1.0, 1.0, s, answer=-0.5, targets=3.0) for s in (None, 0, 1)]
    entries = calibrate(cells)
    assert {e["sequence"] for e in entries} == {None, 0, 1}
    assert {e["measured"] for e in entries} == {"measured_kl_targets", "answer_loss"}


def test_kl_and_likelihood_by_loop():
    generator = torch.Generator().manual_seed(1)
    full, evicted = (torch.randn(70, 11, generator=generator) * 4 for _ in range(2))
    full[3, 4] = evicted[3, 4] = -torch.inf
    following = torch.randint(0, 11, (69,), generator=generator)
    found = compare(full, evicted, following)
    for t in (0, 3, 31, 32, 68, 69):
        p, q = full[t].double().softmax(0).tolist(), evicted[t].double().softmax(0).tolist()
        expected = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)
        assert float(found.kl[t]) == pytest.approx(expected, rel=1e-10)
        assert bool(found.agree[t]) == (p.index(max(p)) == q.index(max(q)))
        if t < 69:
            assert float(found.nll_full[t]) == pytest.approx(-math.log(p[int(following[t])]), rel=1e-10)
            assert float(found.nll_evicted[t]) == pytest.approx(-math.log(q[int(following[t])]), rel=1e-10)
    assert found.nll_full.shape == (69,)
    same = compare(full, full.clone(), following)
    assert float(same.kl.max()) == 0.0
    assert bool(same.agree.all())
