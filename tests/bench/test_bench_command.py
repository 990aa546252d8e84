"""`kvtool bench`: every goal in the document, names checked, and reasons where there is no number."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import kvtool
from kvtool.bench import on_trace, run, scoring, workers
from kvtool.bench.goals import GOALS, Measured
from kvtool.bench.situation import Situation
from kvtool.bench.synthetic import Heads, arrays
from kvtool.bench.timing import OutOfTime, Stopwatch
from kvtool.cli.main import run as command
from kvtool.errors import KvtoolError
from kvtool.layer import Layer
from kvtool.report.terminal_bench import unmet

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "sample_traces" / "tiny-gqa.zarr"
FIELDS = {"name", "ratio", "goal", "at_most", "met", "against", "floor", "unit", "spread", "runs", "reason", "detail"}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Groups that answer at once: 1.0 for each of their goals. The names that were asked for are noted."""
    asked: list[str] = []

    def group(names: tuple[str, ...]) -> run.Measure:
        def measure(here: Situation) -> dict[str, Measured]:
            asked.extend(name for name in names if here.wants(name))
            return {name: Measured(1.0, (0.5, 2.0), 3) for name in names}

        return measure

    monkeypatch.setattr(run, "GROUPS", tuple((names, group(names)) for names, _ in run.GROUPS))
    return asked


def test_every_goal_is_in_the_document_once(quick: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["bench", "--json"]) == 0
    said = capsys.readouterr()
    document = json.loads(said.out)
    assert document["schema"] == "kvtool.bench/1"
    lines = document["goals"]
    assert [line["name"] for line in lines] == [goal.name for goal in GOALS]
    assert all(set(line) == FIELDS for line in lines)
    for line in lines:
        if line["name"] == "kvpress":
            assert (line["ratio"], line["met"]) == (None, None)
            assert "tests/peers/kvpress_replay.py" in line["reason"]
        else:
            assert (line["ratio"], line["spread"], line["runs"], line["reason"]) == (1.0, [0.5, 2.0], 3, None)
            good = line["goal"] is not None and (line["goal"] >= 1 if line["at_most"] else line["goal"] <= 1)
            assert line["met"] is (None if line["goal"] is None else good)
    assert "bench: 1 of" in said.err
    assert "short of its goal: against_masked_sdpa" in said.err


def test_one_measurement_for_each_goal_and_no_other() -> None:
    measured = [name for names, _ in run.GROUPS for name in names]
    assert sorted([*measured, *run.SCRIPTED]) == sorted(goal.name for goal in GOALS)


def test_only_measures_what_was_asked_for(quick: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["bench", "--only", "head_read,workers", "--only", "decode_50_cells"]) == 0
    assert sorted(quick) == ["decode_50_cells", "head_read", "workers"]
    table = capsys.readouterr().out
    assert "head_read" in table
    assert "output_errors_8k" not in table
    lines = {line["name"]: line for line in kvtool.bench(only=["head_read"]).goals}
    assert len(lines) == len(GOALS)
    assert lines["head_read"]["ratio"] == 1.0
    assert lines["decode_against_steps"]["reason"] == run.LEFT_OUT


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--only", "hed_read"], "did you mean head_read?"),
        (["--device", "cdua"], "did you mean cuda?"),
        (["--budget", "0.2"], "at least 1 second"),
        (["--budget", "nan"], "at least 1 second"),
        (["nowhere.zarr"], "nowhere.zarr"),
    ],
)
def test_bad_input_is_one_sentence(
    options: list[str], word: str, quick: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["bench", *options]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert word in said.err
    assert not quick


def test_a_goal_that_finds_no_time_is_null_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(here: Situation) -> dict[str, Measured]:
        raise OutOfTime

    monkeypatch.setattr(run, "GROUPS", ((("head_read",), late),))
    (line,) = (line for line in kvtool.bench().goals if line["name"] == "head_read")
    assert (line["ratio"], line["met"], line["reason"]) == (None, None, run.OUT_OF_TIME)


def test_a_real_goal_is_measured_and_the_table_shows_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command(["bench", "--only", "head_read", "--budget", "60"]) == 0
    said = capsys.readouterr()
    assert "head_read" in said.out
    assert "1 of 1 measured" in said.out or "0 of 1 measured" in said.out
    monkeypatch.setattr(scoring, "SUBSET_TOKENS", 9)
    monkeypatch.setattr(scoring, "LOOPED", 20)
    found = kvtool.bench(only=["exhaustive_seconds"], budget=60)
    (line,) = (line for line in found.goals if line["name"] == "exhaustive_seconds")
    assert line["ratio"] > 0
    assert line["unit"] == "seconds"
    assert unmet(found) in ([], ["exhaustive_seconds"])


def test_workers_are_not_compared_on_a_busy_machine(tmp_path: Path) -> None:
    def here(load: float | None, cores: int) -> Situation:
        return Situation(Stopwatch(10.0), frozenset({"workers"}), tmp_path, TINY, load, cores)

    for situation, word in ((here(3.0, 8), "load"), (here(None, 8), "unknown"), (here(0.0, 1), "one core")):
        found = workers.two_workers(situation)["workers"]
        assert found.ratio is None
        assert word in str(found.reason)


def test_the_layers_of_a_trace_are_measured_beside_the_goals(quick: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_trace, "SECONDS", 0.1)
    found = kvtool.bench(TINY, budget=60)
    further = found.goals[len(GOALS) :]
    layers = found.manifest["trace"]["layers"]
    assert [line["name"] for line in further] == [f"{row}_layer_{layer}" for layer in layers for row in on_trace.ROWS]
    assert all(line["goal"] is None and line["met"] is None for line in further)
    assert all(line["ratio"] > 0 for line in further if line["reason"] is None)
    assert any(line["ratio"] is not None for line in further)


def test_what_sdpa_cannot_compute_is_not_compared_with_it() -> None:
    made = arrays(Heads("small", 4, 2, 16), 120, 120, 0)
    layer = Layer.from_arrays(*made, prompt_length=100, scale=0.25, sink_logits=torch.zeros(4))
    here = Situation(Stopwatch(30.0), frozenset(), Path())
    found = on_trace.on_layer(here, layer)
    assert found["output_errors"].ratio is None
    assert "sink logits" in str(found["output_errors"].reason)


def test_a_wrong_side_stops_the_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "SUBSET_TOKENS", 8)
    monkeypatch.setattr(scoring, "LOOPED", 20)
    right = scoring.all_damages
    monkeypatch.setattr(scoring, "all_damages", lambda *inputs: 1.01 * right(*inputs))
    with pytest.raises(KvtoolError, match="both sides"):
        kvtool.bench(only=["exhaustive_against_loop"])


def test_the_page_names_every_goal() -> None:
    text = (ROOT / "docs" / "bench.md").read_text()
    assert [goal.name for goal in GOALS if f"`{goal.name}`" not in text] == []
