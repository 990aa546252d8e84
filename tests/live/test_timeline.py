"""The table over decode time: spans from event to event by plain loops, predictions beside them, what is shown."""

from __future__ import annotations

import random

import pytest
import torch

from kvtool.layer import Geometry
from kvtool.live import live
from kvtool.live.calibration import calibrate_spans, spearman
from kvtool.live.timeline import mean_timeline, spans_of
from kvtool.metrics.cache_size import live_tokens
from kvtool.replay import replay
from kvtool.report.live_summary import live_sections, live_verdicts
from kvtool.report.live_timeline import Curve, courses, fitted, trust_over_time
from kvtool.report.terminal_live import live_tables
from kvtool.result import Result
from kvtool.retained import Event, RetainedSet
from kvtool.schedule import parse_schedule

OPTIONS = {"budgets": [16, 24], "sinks": 2, "window": 4}
SPANS = [(60, 64), (64, 68), (68, 72), (72, 73)]


@pytest.fixture(scope="module")
def trace(traced):
    return traced("llama", gradients=3)


@pytest.fixture(scope="module")
def result(folder, trace):
    return live(
        folder("llama"), trace, ["snapkv:window=4", "tova", "h2o"], schedules="every:4", calibrate=True, **OPTIONS
    )


def key(entry):
    return entry["policy"], entry["budget"]


def test_spans_hold_the_steps_between_events(result):
    steps = {}
    for entry in result.entries("steps"):
        steps.setdefault(key(entry), {})[entry["step"]] = entry
    found = {}
    for entry in result.entries("spans"):
        found.setdefault((entry["sequence"], *key(entry)), []).append((entry["step_from"], entry["step_to"]))
        mine = [steps[key(entry)][step] for step in range(entry["step_from"], entry["step_to"])]
        kl = [step["kl"] for step in mine]
        assert entry["steps"] == len(mine)
        assert entry["measured_kl"] == pytest.approx(sum(kl) / len(kl), rel=1e-12)
        assert entry["measured_kl_max"] == max(kl)
        assert entry["top1_agreement"] == pytest.approx(sum(step["top1_agrees"] for step in mine) / len(mine))
    assert len(found) == 2 * 5 * 2
    assert all(spans == SPANS for spans in found.values())


def test_spans_add_up_to_the_whole_run(result):
    for cell in result.entries("cells"):
        mine = [e for e in result.entries("spans") if (e["sequence"], *key(e)) == (cell["sequence"], *key(cell))]
        assert len(mine) == 4
        total = sum(e["measured_kl"] * e["steps"] for e in mine)
        assert total / 13 == pytest.approx(cell["measured_kl"], rel=1e-9, abs=1e-15)
        # Windows of one step: the halves of the squares add up as well, over the steps whose target was drawn.
        drawn = [e["steps"] - (e["step_to"] == 73) * (cell["predicted_kl_block"] is None) for e in mine]
        predicted = sum(e["predicted_kl"] * n for e, n in zip(mine, drawn, strict=True))
        assert predicted / sum(drawn) == pytest.approx(cell["predicted_kl"], rel=1e-6, abs=1e-15)


def test_predictions_of_a_span_are_those_of_replay(result, trace):
    opened = replay(trace, ["snapkv:window=4", "tova", "h2o"], schedules="every:4", **OPTIONS)
    theirs = {
        (e["sequence"], *key(e), e["event"]): e["predicted_kl"]
        for e in opened.entries("cells")
        if e["event"] is not None
    }
    mine = {(e["sequence"], *key(e), e["step_from"]): e["predicted_kl"] for e in result.entries("spans")}
    assert mine == theirs
    assert all(value > 0 for (_, policy, _, _), value in mine.items() if policy != "full")


def test_tokens_in_the_cache_by_loop(result):
    decided = {}
    for entry in result.entries("evict_steps"):
        decided.setdefault(key(entry), []).append(entry["evict_step"])
    for entry in result.entries("spans"):
        counts = [
            sum(p <= step < leaves[p] for p in range(len(leaves)))
            for leaves in decided[key(entry)]
            for step in range(entry["step_from"], entry["step_to"])
        ]
        assert entry["mean_cache_tokens"] == pytest.approx(sum(counts) / len(counts))
        assert entry["peak_cache_tokens"] == max(counts)
        if entry["policy"] != "full":
            assert entry["peak_cache_tokens"] <= entry["budget"] + 4


@pytest.mark.parametrize(("kind", "window"), [("full", None), ("sliding", 5), ("chunked", 6)])
def test_live_tokens_by_loop(kind, window):
    draw = random.Random(3)
    geometry = Geometry(0, 4, 2, 8, 8, 1.0, kind=kind, window=window)
    leaves = [[draw.choice([17, draw.randint(p + 1, 17)]) for p in range(17)] for _ in range(2)]
    found = live_tokens(torch.tensor(leaves, dtype=torch.int32), geometry)
    for head in range(2):
        for step in range(17):
            first = int(geometry.first_visible(torch.tensor(step)))
            assert found[head, step] == sum(first <= p <= step < leaves[head][p] for p in range(17))


def test_agreement_over_time(result):
    entries = [e for e in result.entries("calibration") if e["step_from"] is not None]
    assert [(e["step_from"], e["step_to"]) for e in entries] == SPANS
    for entry in entries:
        cells = [
            e
            for e in result.entries("spans")
            if e["sequence"] is None and e["step_from"] == entry["step_from"] and e["policy"] != "full"
        ]
        assert entry["sequence"] is None
        assert entry["cells"] == len(cells) == 8
        rank = spearman([c["predicted_kl"] for c in cells], [c["measured_kl_targets"] for c in cells])
        assert entry["spearman"] == pytest.approx(rank)
        ratios = sorted(c["predicted_kl"] / c["measured_kl_targets"] for c in cells)
        assert entry["ratio_median"] == pytest.approx((ratios[3] + ratios[4]) / 2)
    said = trust_over_time(result)
    assert "4 spans" in said
    assert f"{entries[0]['ratio_median']:.2f} in the first span, {entries[-1]['ratio_median']:.2f} in the last" in said


def test_one_event_has_no_spans(folder, trace):
    found = live(folder("llama"), trace, ["tova"], calibrate=True, **OPTIONS)
    assert found.entries("spans") == []
    assert all(entry["step_from"] is None for entry in found.entries("calibration"))


def sequence_of(length, prompt):
    class Sequence:
        pass

    found = Sequence()
    found.length, found.prompt_length = length, prompt
    return found


def event(step):
    nothing = torch.zeros(1)
    return Event(step, None, *[nothing] * 6, 0, 0)


def test_very_many_events_share_spans_and_layers_share_their_events():
    spans = spans_of(parse_schedule("every:1"), sequence_of(400, 100), {})
    assert len(spans) == 60  # 300 events, five to a span
    assert spans[0] == (100, 105)
    assert spans[-1] == (395, 400)
    sets = {
        layer: RetainedSet(torch.empty(0), [event(step) for step in steps]) for layer, steps in ((0, [5, 9]), (1, [7]))
    }
    assert spans_of(parse_schedule("high-water:8"), sequence_of(20, 5), sets) == [(5, 7), (7, 9), (9, 20)]
    assert spans_of(parse_schedule("at:5"), sequence_of(20, 5), sets) == []


def test_layers_with_events_of_their_own_have_no_common_prediction(folder, traced):
    """A window keeps sliding layers below the mark: replay's spans are not those of the timeline."""
    trace = traced("gemma3", gradients=2)
    found = live(folder("gemma3"), trace, ["tova"], schedules="high-water:24", calibrate=True, budgets=16, window=4)
    layers = [e for e in found.entries("layers") if e["policy"] == "tova"]
    assert len({entry["events"] for entry in layers}) > 1
    spans = [e for e in found.entries("spans") if e["policy"] == "tova"]
    assert spans
    assert all(e["predicted_kl"] is None and e["measured_kl"] > 0 for e in spans)


def test_policies_without_effect_are_said_and_not_ranked(folder, trace):
    found = live(
        folder("llama"), trace, ["tova"], schedules="every:4", calibrate=True, **{**OPTIONS, "budgets": [16, 500]}
    )
    flags = {key(c): c["no_effect"] for c in found.entries("cells")}
    assert flags == {(p, b): b == 500 and p != "full" for p in ("tova", "random", "full") for b in (16, 500)}
    assert all(e["no_effect"] == flags[key(e)] for e in found.entries("layers"))
    assert "budget 500: no policy evicted anything, so there is nothing to compare" in live_verdicts(found)
    assert {e["cells"] for e in found.entries("calibration")} == {2}
    assert [c.section.budget for c in courses(found)] == [16]
    last = live_sections(found)[-1]
    assert [c["policy"] for c in last.cells][-1] == "full"
    assert any("had no effect" in warning for warning in found.warnings)


def test_the_table_fits_and_joined_spans_are_means_over_their_steps(result):
    curve = Curve("a", SPANS, [1.0, 2.0, 4.0, 9.0], [0.5, None, 1.0, 1.0]).joined(3)
    assert curve.spans == [(60, 72), (72, 73)]
    assert curve.measured == [pytest.approx(7 / 3), 9.0]
    assert curve.predicted == [None, 1.0]
    (course, _) = courses(result)
    assert [curve.policy for curve in course.curves] == [
        c["policy"] for c in live_sections(result)[0].cells if c["policy"] != "full"
    ]
    for columns in (1, 2, 3, 9):
        assert len(fitted(course, columns).spans) == {1: 1, 2: 2, 3: 2, 9: 4}[columns]
    import io

    from rich.console import Console

    for width in (60, 80, 120):
        console = Console(width=width, file=io.StringIO(), no_color=True)
        for part in live_tables(result, width):
            console.print(part)
        lines = console.file.getvalue().splitlines()
        assert max(map(len, lines)) <= width
        assert any("KL over decode time, budget 16" in line for line in lines)
        numbers = [line for line in lines if "│ measured  │" in line]
        assert len(numbers) == 8
        assert all("…" not in line for line in numbers)


def test_means_over_sequences_need_every_sequence():
    def entry(sequence, start, kl):
        names = {"policy": "a", "ratio": None, "budget": 8, "schedule": "every:4", "event": None}
        return {"sequence": sequence, **names, "step_from": start, "step_to": start + 4, "steps": 4, "measured_kl": kl}

    found = mean_timeline([entry(0, 8, 1.0), entry(1, 8, 3.0), entry(0, 12, 1.0)], 2)
    assert [(e["step_from"], e["measured_kl"], e["steps"], e["sequence"]) for e in found] == [(8, 2.0, 8, None)]
    (unknown,) = mean_timeline([entry(0, 8, 1.0), entry(1, 8, None)], 2)
    assert unknown["measured_kl"] is None
    assert calibrate_spans([], []) == []


def test_results_with_spans_are_ordinary(result, tmp_path):
    result.save(tmp_path / "r")
    assert Result.load(tmp_path / "r").document() == result.document()
    assert result.tables["spans"].column_names[8:10] == ["step_from", "step_to"]
