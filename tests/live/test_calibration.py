"""Predicted against measured: correlations and pairs by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from kvtool.live.calibration import agreement, calibrate, distinct, pearson, predictors, ranks, spearman
from kvtool.live.measures import Predictions, compare
from kvtool.live.tables import _measured, means
from kvtool.report.live_summary import live_sections, live_verdicts, parting
from kvtool.result import LIVE, Result, table_of


def cell(policy, ratio, predicted, measured, sequence=None, answer=None, targets=None):
    return {
        "sequence": sequence,
        "policy": policy,
        "ratio": ratio,
        "budget": None,
        "schedule": "prompt-end",
        "no_effect": False,
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


def decision(policy, ratio, digest, sequence=0, layer=0):
    return {
        "sequence": sequence,
        "policy": policy,
        "ratio": ratio,
        "budget": None,
        "schedule": "prompt-end",
        "layer": layer,
        "kv_head": 0,
        "digest": digest,
    }


def test_cells_that_decide_alike_count_once():
    cells = [cell(p, 0.5, 1.0, 1.0, s) for s in (0, 1, None) for p in ("a", "b", "c")]
    same = [decision(p, 0.5, "x", 0) for p in ("a", "b")] + [decision("c", 0.5, "y", 0)]
    # In sequence 1, b parts from a in the second layer only, and c does what b does.
    same += [decision(p, 0.5, "x", 1) for p in ("a", "b", "c")]
    same += [decision(p, 0.5, d, 1, layer=1) for p, d in (("a", "u"), ("b", "v"), ("c", "v"))]
    found = {(c["sequence"], c["policy"]) for c in distinct(cells, same)}
    assert found == {(0, "a"), (0, "c"), (1, "a"), (1, "b"), (None, "a"), (None, "b"), (None, "c")}


def measured(policy, sequence, kl, achieved):
    return {
        **cell(policy, 0.5, None, kl, sequence),
        "evaluate": "live",
        "event": None,
        "oracle": False,
        "achieved": achieved,
        "candidates": 2 * achieved,
        "ties": achieved,
        "evaluated_steps": 4,
        "generated": "text",
    }


def test_means_over_sequences_are_means_and_steps_add_up():
    (mean,) = means([measured("a", 0, 1.0, 16), measured("a", 1, 2.0, 24)])
    assert (mean["achieved"], mean["candidates"], mean["ties"]) == (20, 40, 20)
    assert (mean["measured_kl"], mean["evaluated_steps"], mean["generated"]) == (1.5, 8, None)


@pytest.mark.parametrize(
    ("kl", "said"),
    [
        (0.5, "no policy does better than random (0.5 nats); a has 0.5"),
        (0.25, "a changes the model's predictions least"),
    ],
)
def test_what_equals_random_does_not_win(kl, said):
    cells = [measured("full", None, 0.0, 8), measured("random", None, 0.5, 4), measured("a", None, kl, 4)]
    result = Result({}, {"cells": table_of("cells", cells)}, [], LIVE)
    (verdict,) = live_verdicts(result)
    assert said in verdict
    assert ("2.0x below random" in verdict) == (kl == 0.25)


def test_the_whole_cache_has_no_part_in_the_means_of_layers():
    rows = [
        {
            "sequence": 0,
            "policy": policy,
            "ratio": 0.5,
            "budget": None,
            "schedule": "prompt-end",
            "layer": 0,
            "kv_head": 0,
            "q_head": head,
            "output_error": error,
            "closed_output_error": 2 * error,
        }
        for policy, error in (("full", 0.0), ("a", 0.2), ("b", 0.4))
        for head in (0, 1)
    ]
    (found,) = parting(Result({}, {"rows": table_of("rows", rows)}, [], LIVE))
    assert (found.open_error, found.closed_error) == (pytest.approx(0.3), pytest.approx(0.6))
    assert found.ratio == pytest.approx(2.0)


def test_cells_without_a_number_have_no_part_in_correlations():
    """A KL of 0 has no logarithm and no ratio; what is not finite is no measurement."""
    cells = [cell(p, 0.5, x, m) for p, x, m in (("a", 1.0, 2.0), ("b", 2.0, 1.0), ("c", 3.0, 5.0), ("d", 4.0, 0.0))]
    cells += [cell("e", 0.5, 9.0, math.nan), cell("f", 0.5, 9.0, math.inf), cell("g", 0.5, math.nan, 9.0)]
    entry = next(e for e in calibrate(cells) if e["predictor"] == "predicted_kl")
    assert entry["cells"] == 4
    assert entry["spearman"] == pytest.approx(spearman([1, 2, 3, 4], [2, 1, 5, 0]))
    assert (entry["ratio_low"], entry["ratio_high"]) == (0.5, 2.0)
    assert calibrate([cell("full", 0.5, 0.0, 0.0)]) == []


def test_ties_of_the_predictor_are_not_wrong_and_answers_have_no_ratio():
    cells = [cell("a", 0.5, 1.0, 2.0, answer=0.5), cell("b", 0.5, 1.0, 1.0, answer=0.4)]
    found = agreement(cells, "predicted_kl", "measured_kl")
    assert (found["pairs"], found["wrong_pairs"]) == (1, [])
    assert agreement(cells, "predicted_kl", "answer_loss")["ratio_median"] is None


def test_constants_have_no_correlation_however_their_mean_rounds():
    assert pearson([0.1] * 7, [1, 2, 3, 4, 5, 6, 7.5]) is None


def test_predictions_that_overflow_are_undefined_not_infinite():
    full = torch.randn(5, 7, generator=torch.Generator().manual_seed(3))
    evicted = full.clone() + 0.1 * torch.arange(7)
    evicted[1, 2], evicted[2, 2], evicted[3, 0] = math.nan, math.inf, -math.inf
    found = compare(full, evicted, torch.tensor([0, 1, 2, 3]))
    assert found.kl.isnan().tolist() == [False, True, True, True, False]
    assert found.nll_evicted.isnan().tolist() == found.nll_full.isnan().tolist() == [False, True, True, True]


def of_sequence(length, targets, queries):
    gradients = None if targets is None else SimpleNamespace(targets=targets)
    return SimpleNamespace(
        length=length,
        gradients=gradients,
        layer_ids=[0, 1],
        has_array=lambda name, layer: name == "output_gradients" and layer == 0,
        query_steps=lambda layer: torch.tensor(queries),
    )


@pytest.mark.parametrize(
    ("targets", "queries", "event", "expected"),
    [
        (None, range(12), 8, []),
        ((8, 12), range(12), 8, [8, 9, 10, 11]),
        ((9, 11), range(12), 8, [9, 10]),
        ((4, 10), range(12), 8, [8, 9]),  # the event lies inside the targets
        ((0, 12), range(10, 12), 8, [10, 11]),  # no query, no prediction
    ],
)
def test_what_is_measured_is_what_is_predicted(targets, queries, event, expected):
    sequence = of_sequence(12, targets, list(queries))
    kl = torch.arange(12, dtype=torch.float64)[event:]
    following = torch.zeros(11 - event, dtype=torch.float64)
    found = _measured(sequence, event, SimpleNamespace(predictions=Predictions(kl, kl > 0, following, following)))
    assert found["measured_kl"] == pytest.approx(float(kl.mean()))
    assert found["measured_kl_targets"] == (pytest.approx(sum(expected) / len(expected)) if expected else None)
    kl[1] = math.nan
    found = _measured(sequence, event, SimpleNamespace(predictions=Predictions(kl, kl > 0, following, following)))
    assert (found["measured_kl"], found["top1_agreement"], found["undefined_steps"]) == (None, None, 1)


def test_a_cell_that_could_not_be_measured_stands_below_the_others_and_has_no_mean():
    cells = [measured("full", None, 0.0, 8), measured("a", None, None, 4), measured("b", None, 0.5, 4)]
    result = Result({}, {"cells": table_of("cells", cells)}, [], LIVE)
    (section,) = live_sections(result)
    assert [c["policy"] for c in section.cells] == ["b", "a", "full"]
    assert "b changes the model's predictions least" in live_verdicts(result)[0]
    (mean,) = means([measured("a", 0, None, 4), measured("a", 1, 0.5, 4)])
    assert mean["measured_kl"] is None
