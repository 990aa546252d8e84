"""Landmarks through replay: which rows that matter were there at the end, as a table and as a retention map."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import kvtool
from kvtool.cli.main import run
from kvtool.layer import Geometry
from kvtool.metrics import landmark_entries
from kvtool.replay import replay
from kvtool.report.terminal_landmarks import kept_word
from kvtool.result import Result
from kvtool.retained import RetainedSet
from kvtool.trace import TraceWriter

TINY = Path(__file__).resolve().parents[2] / "sample_traces" / "tiny-gqa.zarr"


@pytest.fixture(scope="module")
def needles(tmp_path_factory):
    path = tmp_path_factory.mktemp("needles") / "needles.zarr"
    return kvtool.synth("needle", path, depths=[0.1, 0.5, 0.9], lengths=[128, 512], steps=32, layers=1)


def test_entries_count_rows_by_row():
    evict = torch.tensor([[6, 6, 4, 6, 5, 6], [6, 3, 3, 6, 6, 6]], dtype=torch.int32)
    found = landmark_entries(RetainedSet(evict), {"a": [1], "b": [2, 3, 4]})
    assert [(e["kv_head"], e["landmark"], e["rows"], e["kept"], e["first_lost"]) for e in found] == [
        (0, "a", 1, 1, None),
        (0, "b", 3, 1, 4),
        (1, "a", 1, 0, 3),
        (1, "b", 3, 2, 3),
    ]


def test_the_table_agrees_with_the_decisions(needles):
    result = replay(needles, ["snapkv:window=16", "oracle-mass"], ratios=["0.75", "0.9"])
    decided = {
        (e["policy"], e["ratio"], e["sequence"], e["layer"], e["kv_head"]): e["evict_step"]
        for e in result.entries("evict_steps")
    }
    entries = result.entries("landmarks")
    assert len(entries) == 4 * 2 * 6 * 2  # policies with the controls, ratios, sequences, KV heads
    for e in entries:
        sequence = needles.sequences[e["sequence"]]
        (row,) = sequence.landmarks["needle"]
        step = decided[e["policy"], e["ratio"], e["sequence"], e["layer"], e["kv_head"]][row]
        assert e["kept"] == (step == sequence.length)
        assert e["first_lost"] == (None if e["kept"] else step)
        assert (e["rows"], e["depth"]) == (1, sequence.synthetic["depth"])
        assert (e["prompt_length"], e["synthetic"], e["event"]) == (sequence.prompt_length, "needle", None)


def test_depth_and_length_make_a_map(needles, capfd):
    """StreamingLLM's window reaches back a quarter of the prompt: it keeps depth 0.9 and nothing before."""
    options = ["-p", "streaming-llm", "-p", "oracle-mass", "-r", "0.75", "--sinks", "4", "--window", "8"]
    assert run(["replay", str(needles.path), *options]) == 0
    shown = capfd.readouterr().out
    part = shown[shown.index("landmarks, ratio 0.75") :].splitlines()
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in part if line.startswith("│")]
    assert [line for line in part if "prompt 128" in line and "prompt 512" in line]
    start = [row[0] for row in cells].index("streaming-llm")
    assert cells[start : start + 3] == [
        ["streaming-llm", "0.1", "lost", "lost"],
        ["", "0.5", "lost", "lost"],
        ["", "0.9", "kept", "kept"],
    ]
    start = [row[0] for row in cells].index("oracle-mass")
    assert [row[2:] for row in cells[start : start + 3]] == [["kept", "kept"]] * 3
    assert "full" not in [row[0] for row in cells]


def test_other_landmarks_have_a_line_each(tmp_path, capfd):
    path = kvtool.synth("phase-shift", tmp_path / "run.zarr", prompt=128, steps=16).path
    assert run(["replay", str(path), *["-p", "tova", "-r", "0.75,0.5", "--window", "8"]]) == 0
    shown = capfd.readouterr().out
    lines = [line.split("│")[1:-1] for line in shown.splitlines() if "before" in line or "after" in line]
    words = [[cell.strip() for cell in line] for line in lines if len(line) == 4]
    assert len(words) == 2 * 2 * 2  # tova and random, both landmarks, both ratios
    assert ["", "after", "8", "kept"] in words
    assert ["tova", "before", "8", "lost"] in words


def test_a_part_is_shown_as_a_part():
    heads = [{"rows": 1, "kept": kept} for kept in (1, 0, 0, 1)]
    assert kept_word(heads) == "2/4"
    assert kept_word([{"rows": 8, "kept": 3}, {"rows": 8, "kept": 8}]) == "69 %"
    assert kept_word([{"rows": 400, "kept": 399}, {"rows": 400, "kept": 400}]) == "99 %"
    assert [kept_word([{"rows": 2, "kept": kept}]) for kept in (2, 0)] == ["kept", "lost"]


def test_schedules_tell_when_it_was_lost(needles):
    """Attention of the newest query loses the needle at the first event, before any query wants it; what was
    evicted does not return when the last 16 queries ask."""
    result = replay(needles, ["tova", "oracle-mass"], budgets=[64], schedules=["every:8"], sequences=[1], window=8)
    found = {(e["policy"], e["kv_head"]): (e["kept"], e["first_lost"]) for e in result.entries("landmarks")}
    first = min(c["event"] for c in result.entries("cells") if c["policy"] == "tova" and c["event"] is not None)
    assert {found["tova", head] for head in (0, 1)} == {(0, first)}
    assert {found["oracle-mass", head] for head in (0, 1)} == {(1, None)}


def test_the_table_is_kept_and_printed(needles, tmp_path, capfd):
    options = ["-p", "knorm", "-r", "0.5", "--sequences", "0"]
    assert run(["replay", str(needles.path), *options, "-o", str(tmp_path / "out"), "--json"]) == 0
    document = json.loads(capfd.readouterr().out)
    assert len(document["landmarks"]) == 3 * 2
    assert Result.load(tmp_path / "out").entries("landmarks") == document["landmarks"]


def test_sequences_without_landmarks_have_no_entries(tmp_path):
    path = tmp_path / "run.zarr"
    with TraceWriter(path, model={"name": "x"}, tokenizer=None, capture={}, dtype=torch.float32) as writer:
        for attributes in ({}, {"landmarks": {"x": [5, 7]}}):
            sequence = writer.sequence({0: Geometry(0, 2, 1, 8, 8, 1.0)}, prompt_length=40, attributes=attributes)
            block = torch.randn(1, 48, 8, generator=torch.Generator().manual_seed(0))
            sequence.append(0, keys=block, values=block, queries=block.expand(2, 48, 8), query_steps=torch.arange(48))
            sequence.finish(tokens=torch.zeros(48), positions=torch.arange(48))
    entries = replay(path, ["knorm"], ratios=["0.5"], window=4).entries("landmarks")
    assert {(e["sequence"], e["landmark"], e["synthetic"], e["depth"]) for e in entries} == {(1, "x", None, None)}


def test_a_trace_without_landmarks_has_no_table(capfd):
    assert "landmarks" not in replay(TINY, ["knorm"], ratios=["0.5"], layers=[0]).tables
    assert run(["replay", str(TINY), "-p", "knorm", "-r", "0.5", "--layers", "0"]) == 0
    assert "landmark" not in capfd.readouterr().out


def test_inspect_shows_landmarks_and_the_answer(needles, capfd):
    assert run(["inspect", str(needles.path)]) == 0
    shown = " ".join(capfd.readouterr().out.split())
    assert "sequence landmark rows known answer" in shown
    assert "2 needle 64 keep row 64: no query before step 144 attends to it" in shown
