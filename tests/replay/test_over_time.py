"""Tables of repeating schedules against plain loops over the decisions, and their bytes after a resume."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtool.errors import KvtoolError
from kvtool.metrics import evaluate_layer
from kvtool.replay import replay, run
from kvtool.replay.events import shown_events
from kvtool.replay.timeline import bins
from kvtool.result import Result
from kvtool.retained import Event, RetainedSet
from kvtool.trace import open_trace

SAMPLES = Path(__file__).resolve().parents[2] / "sample_traces"
TINY, GRADIENTS = SAMPLES / "tiny-gqa.zarr", SAMPLES / "smollm2-gradients.zarr"
ASKED: dict[str, Any] = {
    "policies": ["snapkv:window=4", "h2o"],
    "budgets": [24],
    "schedules": ["every:5", "prompt-end", "every:8/block:4"],
    "sinks": 1,
    "window": 4,
    "precision": "float64",
}
# The trace stores two bytes a number.
CELL = ("sequence", "policy", "schedule", "layer")


@pytest.fixture(scope="module")
def result() -> Result:
    return replay(TINY, bin_steps=6, **ASKED)


def evictions(result: Result) -> dict[tuple[Any, ...], torch.Tensor]:
    """[Hk, T] by sequence, policy, schedule, layer."""
    found: dict[tuple[Any, ...], list[list[int]]] = {}
    for entry in result.entries("evict_steps"):
        found.setdefault(tuple(entry[name] for name in CELL), []).append(entry["evict_step"])
    return {key: torch.tensor(rows, dtype=torch.int32) for key, rows in found.items()}


def live_at(leaves: list[int], step: int, window: int | None) -> int:
    return sum(step < leaves[p] and (window is None or step - p < window) for p in range(step + 1))


def test_bins_cover_all_steps_and_are_at_most_32() -> None:
    for first, last in ((0, 1), (128, 160), (2048, 2560), (7, 40), (0, 33)):
        spans = bins(first, last)
        assert [step for low, high in spans for step in range(low, high)] == list(range(first, last))
        assert len(spans) <= 32
        assert len({high - low for low, high in spans[:-1]}) <= 1
    assert bins(10, 17, 3) == [(10, 13), (13, 16), (16, 17)]


def test_bins_of_a_layer_are_errors_of_their_steps_alone(result: Result) -> None:
    trace, decided, checked = open_trace(TINY), evictions(result), 0
    for entry in result.entries("timeline"):
        if entry["layer"] is None or entry["sequence"] != 1 or entry["step_from"] not in (128, 158):
            continue
        layer = trace.sequences[1].layer(entry["layer"], dtype=torch.float64)
        retained = RetainedSet(decided[tuple(entry[name] for name in CELL)])
        assert (entry["step_from"], entry["step_to"]) in ((128, 134), (158, 160))
        (errors,) = evaluate_layer(layer, [retained], torch.arange(entry["step_from"], entry["step_to"]))
        heads = (errors.squared_error.sum(1) / errors.squared_output.sum(1)).sqrt()
        assert entry["output_error"] == pytest.approx(float(heads.mean()), rel=1e-12)
        assert errors.layer_squared_error is not None
        assert errors.layer_squared_output is not None
        whole = (errors.layer_squared_error.sum() / errors.layer_squared_output.sum()).sqrt()
        assert entry["layer_error"] == pytest.approx(float(whole), rel=1e-12)
        assert entry["evicted_mass"] == pytest.approx(float(errors.mass.mean()), rel=1e-12)
        assert entry["mean_layer_error"] is None
        steps = range(entry["step_from"], entry["step_to"])
        sizes = [live_at(mine, t, layer.geometry.window) for mine in retained.evict_step.tolist() for t in steps]
        assert entry["mean_cache_tokens"] == pytest.approx(sum(sizes) / len(sizes), rel=1e-14)
        assert entry["peak_cache_tokens"] == max(sizes)
        checked += 1
    assert checked == 4 * 3 * 3 * 2  # policies and controls, schedules, layers, bins


def test_bins_over_layers_are_means_over_layers_and_heads(result: Result) -> None:
    entries = result.entries("timeline")
    for one in (e for e in entries if e["layer"] is None):
        key = [one[name] for name in ("sequence", "policy", "schedule", "step_from")]
        mine = [
            e
            for e in entries
            if e["layer"] is not None and [e[name] for name in ("sequence", "policy", "schedule", "step_from")] == key
        ]
        assert len(mine) == 3
        assert one["mean_layer_error"] == pytest.approx(sum(e["layer_error"] for e in mine) / 3, rel=1e-13)
        # Every layer of this trace has the same numbers of heads.
        for name in ("output_error", "evicted_mass", "mean_cache_tokens"):
            assert one[name] == pytest.approx(sum(e[name] for e in mine) / 3, rel=1e-13, abs=1e-15)
        assert one["peak_cache_tokens"] == max(e["peak_cache_tokens"] for e in mine)
        assert one["layer_error"] is None


@pytest.mark.parametrize("width", [None, 7])
def test_predicted_kl_of_the_bins_adds_up_to_that_of_the_run(width: int | None) -> None:
    found = replay(GRADIENTS, ["knorm"], budgets=[64], schedules=["every:20"], bin_steps=width)
    cells = [c for c in found.entries("cells") if c["event"] is None and c["sequence"] == 0]
    for cell in cells:
        mine = [e for e in found.entries("timeline") if e["layer"] is None and e["policy"] == cell["policy"]]
        drawn = sum(e["predicted_kl_steps"] for e in mine)
        assert drawn == cell["predicted_kl_steps"] > 0
        whole = sum(e["predicted_kl"] * e["predicted_kl_steps"] for e in mine if e["predicted_kl_steps"]) / drawn
        assert whole == pytest.approx(cell["predicted_kl"], rel=1e-12, abs=1e-18)
    assert max(cell["predicted_kl"] for cell in cells) > 0


def test_the_cache_that_every_query_finds(result: Result) -> None:
    trace, decided = open_trace(TINY), evictions(result)
    entries = result.entries("cache")
    assert len(entries) == len(result.entries("evict_steps"))
    for entry in entries:
        window = trace.sequences[entry["sequence"]].geometry(entry["layer"]).window
        leaves = decided[tuple(entry[name] for name in CELL)][entry["kv_head"]].tolist()
        assert entry["steps"] == list(range(128, 160))
        assert entry["cache_tokens"] == [live_at(leaves, step, window) for step in entry["steps"]]
    assert "cache" not in result.document()


def test_cells_sum_bytes_over_layers_at_the_same_step(result: Result) -> None:
    geometry = open_trace(TINY).sequences[0].geometry(0)
    for cell in result.entries("cells"):
        if cell["sequence"] is None or cell["event"] is not None:
            continue
        mine = [
            e["cache_tokens"]
            for e in result.entries("cache")
            if all(e[name] == cell[name] for name in ("sequence", "policy", "schedule"))
        ]
        held = [sum(column) * (geometry.key_dim + geometry.value_dim) * 2 for column in zip(*mine, strict=True)]
        assert cell["peak_cache_bytes"] == max(held)
        assert cell["mean_cache_bytes"] == pytest.approx(sum(held) / len(held), rel=1e-14)
        assert cell["peak_cache_tokens"] == max(map(max, mine))


def test_events_equal_a_loop_over_tokens(result: Result) -> None:
    trace, decided, seen = open_trace(TINY), evictions(result), set()
    for entry in result.entries("events"):
        geometry = trace.sequences[entry["sequence"]].geometry(entry["layer"])
        step, evict = entry["event"], decided[tuple(entry[name] for name in CELL)].tolist()
        pools = [
            [p for p in range(step) if mine[p] >= step and (geometry.window is None or step - p < geometry.window)]
            for mine in evict
        ]
        kept = [[p for p in pool if mine[p] > step] for mine, pool in zip(evict, pools, strict=True)]
        assert (entry["candidates_min"], entry["candidates_max"]) == (min(map(len, pools)), max(map(len, pools)))
        assert (entry["achieved_min"], entry["achieved_max"]) == (min(map(len, kept)), max(map(len, kept)))
        assert (entry["cache_before"], entry["cache_after"]) == (sum(map(len, pools)), sum(map(len, kept)))
        assert entry["evicted"] == sum(map(len, pools)) - sum(map(len, kept))
        budget = 160 if entry["policy"] == "full" else 24
        assert entry["allowed_max"] == min(budget, max(map(len, pools)))
        assert entry["allowed_min"] == min(budget, min(map(len, pools)))
        shielded = sum(p < 1 or p >= step - 4 for pool in pools for p in pool)
        assert entry["protected_tokens"] >= shielded
        if entry["policy"] == "random":
            assert entry["protected_tokens"] == shielded
        assert entry["page_tokens"] == (4 if "block" in entry["schedule"] else 16)
        moved = 0
        for pool, mine in zip(pools, kept, strict=True):
            moved += sum(pool.index(p) != slot for slot, p in enumerate(mine))
        size = (geometry.key_dim + geometry.value_dim) * 2
        assert entry["compaction_bytes"] == (0 if "block" in entry["schedule"] else moved * size)
        assert (entry["layer_error"] is not None) == (step < 160)
        assert entry["attention_entropy"] > 0
        seen.add((entry["schedule"], step))
    assert {step for schedule, step in seen if schedule == "every:5"} == set(range(128, 160, 5))
    assert {step for schedule, step in seen if schedule == "prompt-end"} == {128}


def test_errors_at_an_event_are_those_of_its_own_step() -> None:
    fine = replay(TINY, bin_steps=1, **ASKED)
    steps = {
        (*(e[name] for name in CELL), e["step_from"]): e for e in fine.entries("timeline") if e["layer"] is not None
    }
    events = fine.entries("events")
    for event in events:
        step = steps[(*(event[name] for name in CELL), event["event"])]
        assert event["output_error"] == pytest.approx(step["output_error"], rel=1e-13)
        assert event["layer_error"] == pytest.approx(step["layer_error"], rel=1e-13)
    assert events


def test_very_many_events_are_thinned_evenly() -> None:
    none = torch.zeros(1)
    runs = [RetainedSet(torch.zeros(1, 1), [Event(s, None, *[none] * 6, 0, 0) for s in range(n)]) for n in (0, 50, 7)]
    assert [len(events) for events in shown_events(runs, most=100)] == [0, 50, 7]
    thinned = [[event.step for event in events] for events in shown_events(runs, most=20)]
    assert [len(steps) for steps in thinned] == [0, 10, 7]
    assert (thinned[1][0], thinned[1][-1]) == (0, 49)


def test_tables_of_repeating_schedules_stand_nowhere_else() -> None:
    once = replay(TINY, ["knorm"], budgets=[24], layers=[0])
    assert not {"timeline", "events", "cache", "telemetry"} & set(once.tables)
    never = replay(TINY, ["knorm"], budgets=[24], layers=[0], schedules=["every:8,from:500"])
    assert never.tables["events"].num_rows == 0
    assert "fragmentation" in never.tables["events"].column_names
    with pytest.raises(KvtoolError, match="--bin 4"):
        replay(TINY, ["knorm"], bin_steps=4)
    with pytest.raises(KvtoolError, match="--bin 0"):
        replay(TINY, ["knorm"], schedules=["every:8"], bin_steps=0)


def test_telemetry_times_every_event_that_asked_the_policy() -> None:
    asked: dict[str, Any] = {**ASKED, "policies": ["capkv"], "schedules": ["every:8"], "layers": [0]}
    timed, plain = replay(TINY, telemetry=True, **asked), replay(TINY, **asked)
    assert "telemetry" not in plain.tables
    entries = timed.entries("telemetry")
    known = {(e["sequence"], e["policy"], e["event"]) for e in timed.entries("events") if e["evicted"]}
    assert {(e["sequence"], e["policy"], e["event"]) for e in entries} == known
    for entry in entries:
        stages = [entry[f"{name}_ms"] for name in ("scoring", "factorisation", "selection", "compaction")]
        assert entry["eviction_ms"] == pytest.approx(sum(stages), rel=1e-12)
        assert min(stages[0], stages[2], stages[3]) > 0
        assert (stages[1] > 0) == (entry["policy"] == "capkv")
        assert entry["peak_temporary_bytes"] > 0
    for name in ("cells", "layers", "rows", "ages", "evict_steps", "timeline", "events", "cache"):
        assert timed.tables[name].equals(plain.tables[name]), name


def test_a_killed_run_under_a_schedule_resumes_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay(TINY, output=tmp_path / "whole", **ASKED)
    real, done = run.run_unit, []

    def stops_at_the_third(*arguments: Any) -> Any:
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(1)
        return real(*arguments)

    monkeypatch.setattr(run, "run_unit", stops_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        replay(TINY, output=tmp_path / "resumed", **ASKED)
    again = []

    def counted(*arguments: Any) -> Any:
        again.append(1)
        return real(*arguments)

    monkeypatch.setattr(run, "run_unit", counted)
    replay(TINY, output=tmp_path / "resumed", **ASKED)
    assert len(again) == 4  # of 2 sequences x 3 layers
    files = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert {"timeline.parquet", "events.parquet", "cache.parquet"} <= set(files)
    for name in files:
        if name != "manifest.json":
            assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "resumed" / name).read_bytes(), name
    # Without repeating schedules none of their tables stays behind.
    shutil.copytree(tmp_path / "whole", tmp_path / "replaced")
    replay(TINY, ["knorm"], budgets=[24], layers=[0], output=tmp_path / "replaced", force=True)
    assert not (tmp_path / "replaced" / "timeline.parquet").exists()


def test_numbers_are_finite_or_null(result: Result) -> None:
    for name in ("timeline", "events"):
        for entry in result.entries(name):
            assert not [v for v in entry.values() if isinstance(v, float) and not math.isfinite(v)]


def test_how_close_every_event_of_a_head_was(result: Result, tmp_path: Path) -> None:
    known: dict[tuple[Any, ...], list[tuple[int, int]]] = {}
    for entry in result.entries("events"):
        known.setdefault(tuple(entry[name] for name in CELL), []).append((entry["event"], entry["ties"]))
    result.save(tmp_path / "saved")
    seen = 0
    for entry in Result.load(tmp_path / "saved").entries("evict_steps"):
        events = known.get(tuple(entry[name] for name in CELL), [])
        assert entry["event_steps"] == [step for step, _ in events]
        assert len(entry["event_ties"]) == len(events)
        told = zip(entry["event_margins"], entry["event_near_ties"], events, strict=True)
        for margin, near, (_, ties) in told:
            assert margin is None or (margin > 1e-10) == (near == 0)
            assert near > 0 or ties == 0
            seen += margin is not None
    assert seen > 100
