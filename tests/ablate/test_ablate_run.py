"""Whole studies on the sample traces: against replay's own numbers, resumed, repeated, refused."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch

import kvtool.ablate.measure
from kvtool.ablate.measure import Group
from kvtool.ablate.run import ablate
from kvtool.cli.main import run
from kvtool.errors import KvtoolError
from kvtool.replay.plan import make_plan
from kvtool.replay.run import replay
from kvtool.report.ablate_summary import blocks, verdicts
from kvtool.report.terminal_ablate import ablate_tables
from kvtool.result import Result

ROOT = Path(__file__).resolve().parents[2]
TINY, GRADIENTS = ROOT / "sample_traces" / "tiny-gqa.zarr", ROOT / "sample_traces" / "smollm2-gradients.zarr"
SMALL = {"axes": "temperature,ridge,protection", "sinks": 1, "window": 8, "ratios": ["0.5"]}
METRICS = ("mean_layer_error", "mean_output_error")


@pytest.fixture(scope="module")
def study() -> Result:
    return ablate(TINY, **SMALL)


def cell_of(result: Result, changes: list[str], sequence: int | None, kind: str | None = None) -> dict:
    (found,) = [
        c
        for c in result.entries("cells")
        if c["changes"] == changes and c["sequence"] == sequence and c["kind"] in (kind, "reference", "single", "pair")
    ]
    return found


def expect_same(mine: dict, theirs: dict) -> None:
    """Equal, numbers to the rounding of float32: which sums a cell shares with others depends on what else is asked."""
    assert mine.keys() == theirs.keys()
    for name, number in theirs.items():
        expected = pytest.approx(number, rel=1e-5, abs=1e-7) if isinstance(number, float) else number
        assert mine[name] == expected, name


def test_cells_are_replays_own_numbers(study: Result) -> None:
    own = {"sinks": 1, "window": 8, "ratios": ["0.5"]}
    again = replay(TINY, ["jacap:tau=1", "jacap", "snapkv"], **own).entries("cells")
    replayed = {(c["policy"], c["sequence"]): c for c in again}
    held = 0
    for cell in study.entries("cells"):
        if cell["protected"] is None and (cell["policy"], cell["sequence"]) in replayed:
            theirs = replayed[cell["policy"], cell["sequence"]]
            expect_same({k: cell[k] for k in theirs}, theirs)
            held += 1
    assert held >= 9


def test_a_protected_share_is_replays_own_protection(study: Result) -> None:
    tokens = 128 * 5 // 100  # both prompts have 128 tokens
    theirs = replay(TINY, ["jacap:ridge=relative"], ratios=["0.5"], sinks=1, window=tokens - 1).entries("cells")
    for other in theirs:
        if other["policy"].startswith("jacap"):
            mine = cell_of(study, ["ridge=relative", "protect 5 %"], other["sequence"])
            assert mine["mean_layer_error"] == pytest.approx(other["mean_layer_error"], rel=1e-6)
            assert mine["protected"] == "5"


@pytest.mark.parametrize(
    ("percent", "step", "sinks", "window"),
    [("0", 512, 0, 0), ("5", 512, 4, 21), ("10", 512, 4, 47), ("5", 40, 2, 0), ("5", 100, 4, 1), ("10", 9, 0, 0)],
)
def test_a_share_protects_sinks_first_and_then_the_newest(percent: str, step: int, sinks: int, window: int) -> None:
    protection = Group(percent, make_plan(["knorm"])).at(step).protection
    assert (protection.sinks, protection.window) == (sinks, window)
    assert sinks + window == int(percent) * step // 100


def test_effects_and_interactions_follow_from_the_cells(study: Result) -> None:
    for metric in METRICS:
        for entry in study.entries("effects"):
            if entry["metric"] != metric or entry["kind"] != "level":
                continue
            change, reference = cell_of(study, [entry["level"]], None), cell_of(study, [], None)
            assert entry["at_reference"] == pytest.approx(change[metric] - reference[metric], abs=1e-12)
        for entry in study.entries("interactions"):
            if entry["metric"] == metric:
                a, b = entry["level_a"], entry["level_b"]
                per_sequence = [
                    cell_of(study, [a, b], s)[metric]
                    - cell_of(study, [a], s)[metric]
                    - cell_of(study, [b], s)[metric]
                    + cell_of(study, [], s)[metric]
                    for s in (0, 1)
                ]
                assert entry["interaction"] == pytest.approx(np.mean(per_sequence), abs=1e-12)
                half = 12.706204736174698 * abs(per_sequence[0] - per_sequence[1]) / 2
                assert entry["high"] - entry["low"] == pytest.approx(2 * half, abs=1e-9)
    assert study.manifest["ablate"]["paired_over"] == "sequences"


def test_the_overlap_is_the_jaccard_of_kept_tokens(study: Result) -> None:
    theirs = replay(TINY, ["jacap", "jacap:tau=1"], ratios=["0.5"], sinks=1, window=8)
    kept: dict[str, list] = {}
    for entry in theirs.entries("evict_steps"):
        first = 128 - 47 if entry["layer"] == 5 else 0  # the window of 48 tokens, query 128 itself included
        gone = {row for row, step in enumerate(entry["evict_step"]) if step == 128}
        kept.setdefault(entry["policy"], []).append(set(range(first, 128)) - gone)
    pairs = list(zip(kept["jacap"], kept["jacap:tau=1.0"], strict=True))
    expected = np.mean([len(a & b) / len(a | b) for a, b in pairs])
    assert cell_of(study, ["tau=1"], None)["overlap"] == pytest.approx(expected, abs=1e-12)
    assert cell_of(study, [], None)["overlap"] == 1.0


def test_the_same_study_gives_the_same_bytes(study: Result, tmp_path: Path) -> None:
    study.save(tmp_path / "a")
    ablate(TINY, **SMALL, output=tmp_path / "b")
    for name in ("cells", "effects", "interactions"):
        file = f"{name}.parquet"
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    loaded = Result.load(tmp_path / "b")
    assert loaded.schema == "kvtool.ablate/1"
    assert loaded.document() == study.document()
    assert not (tmp_path / "b" / "parts").exists()


def test_a_stopped_study_resumes(study: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    ran: list[int] = []
    real = kvtool.ablate.measure.run_unit

    def counted(sequence, layer_id, plan, step, which):
        ran.append(layer_id)
        return real(sequence, layer_id, plan, step, which=which)

    def stop(done: int, total: int, what: str) -> None:
        assert total == 24  # two sequences, three layers, four protections
        if done == 7:
            raise KeyboardInterrupt

    monkeypatch.setattr(kvtool.ablate.measure, "run_unit", counted)
    with pytest.raises(KeyboardInterrupt):
        ablate(TINY, **SMALL, output=out, progress=stop)
    assert len(ran) == 7
    assert not (out / "manifest.json").exists()
    resumed = ablate(TINY, **SMALL, output=out)
    assert len(ran) == 24
    assert resumed.document() == study.document()
    with pytest.raises(KvtoolError, match="already holds a result"):
        ablate(TINY, **SMALL, output=out)


def test_one_sequence_pairs_layers_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    result = ablate(TINY, **SMALL, sequences=[0])
    assert result.manifest["ablate"]["paired_over"] == "layers"
    assert {entry["pairs"] for entry in result.entries("effects")} == {3}
    said = " ".join(str(part) for part in ablate_tables(result))
    assert "One sequence: 95 % intervals pair its 3 layers" in said


def test_gradients_order_by_predicted_kl_and_layers_add_up() -> None:
    layers = range(0, 30, 6)
    result = ablate(GRADIENTS, axes="temperature", interactions=False, layers=layers)
    study = result.manifest["ablate"]
    assert (study["metric"], study["metrics"]) == ("predicted_kl", ["predicted_kl", "mean_output_error"])
    theirs = replay(GRADIENTS, ["jacap", "jacap:tau=1"], ratios=["0.75"], layers=layers)
    replayed = {(c["policy"], c["sequence"]): c for c in theirs.entries("cells")}
    for changes, policy in (([], "jacap"), (["tau=1"], "jacap:tau=1.0")):
        mine = cell_of(result, changes, 0)
        expect_same({name: mine[name] for name in replayed[policy, 0]}, replayed[policy, 0])
    shares = {
        policy: [e["predicted_kl_share"] for e in theirs.entries("layers") if e["policy"] == policy]
        for policy in ("jacap", "jacap:tau=1.0")
    }
    moved = 5 * (np.array(shares["jacap:tau=1.0"]) - np.array(shares["jacap"]))
    entry = next(e for e in result.entries("effects") if e["level"] == "tau=1")
    assert (entry["metric"], entry["paired_over"], entry["pairs"]) == ("predicted_kl", "layers", 5)
    # a difference of two errors, each known to 1e-6
    assert entry["effect"] == pytest.approx(moved.mean(), rel=1e-4)
    half = 2.7764451051977987 * moved.std(ddof=1) / np.sqrt(5)
    assert (entry["low"], entry["high"]) == pytest.approx((moved.mean() - half, moved.mean() + half), rel=1e-4)


@pytest.mark.parametrize(("threads", "expected"), [(None, 1), (2, 2)])
def test_small_traces_run_on_one_thread_unless_told_otherwise(
    threads: int | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(torch, "set_num_threads", seen.append)
    ablate(TINY, axes="ridge", layers=[0], threads=threads, interactions=False)
    assert seen == [expected, torch.get_num_threads()]


def test_several_ratios_stand_beside_each_other() -> None:
    result = ablate(TINY, axes="temperature", sinks=1, window=8, ratios=["0.5", "0.25"])
    assert [block.ratio for block in blocks(result)] == [0.5, 0.25]
    single = ablate(TINY, axes="temperature", sinks=1, window=8, ratios=["0.25"])
    mine = [e for e in result.entries("effects") if e["ratio"] == 0.25]
    alone = single.entries("effects")
    assert len(mine) == len(alone) > 0
    for entry, other in zip(mine, alone, strict=True):
        expect_same(entry, other)


def test_the_first_line_names_the_axis_of_rank_one(study: Result, capfd: pytest.CaptureFixture[str]) -> None:
    command = ["ablate", str(TINY), "--axes", SMALL["axes"], "--sinks", "1", "--window", "8", "-r", "0.5"]
    assert run(command) == 0
    out, err = capfd.readouterr()
    largest = next(e for e in study.entries("effects") if e["rank"] == 1 and e["metric"] == "mean_layer_error")
    first = out.splitlines()[0]
    assert first.startswith(f"ratio 0.5: {largest['axis']} changes most: {largest['level']} instead of ")
    assert f"{abs(largest['effect']):.4f}" in " ".join(out.splitlines()[:2])
    assert "variants of jacap" in err
    assert "(sequence, layer) pairs: about" in err
    assert err.splitlines()[-1].startswith("next: kvtool ")
    assert verdicts(blocks(study)[0])[0].startswith(first.rsplit(" ", 1)[0][:60])


@pytest.mark.parametrize("width", [80, 100, 120, 160])
def test_tables_fit_the_terminal(study: Result, width: int) -> None:
    from rich.console import Console

    console = Console(width=width, record=True, file=io.StringIO())
    for part in ablate_tables(study, width):
        console.print(part)
    text = console.export_text()
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    assert "…" in text  # intervals
    shown = [line for line in text.splitlines() if line.startswith("│ temperature")]
    assert len(shown) >= 3
    assert all("  " not in line.split("│")[3].strip() for line in shown)


def test_json_is_one_document(capfd: pytest.CaptureFixture[str]) -> None:
    assert (
        run(["ablate", str(TINY), "--axes", "ridge", "--layers", "0", "--json", "--sinks", "1", "--window", "8"]) == 0
    )
    document = json.loads(capfd.readouterr().out)
    assert document["schema"] == "kvtool.ablate/1"
    assert {"cells", "effects", "interactions", "manifest", "warnings"} <= set(document)
    assert document["interactions"] == []
    assert [e["level"] for e in document["effects"] if e["kind"] == "level"][:2]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--axes", "temprature"], "usage", "did you mean temperature?"),
        (["--metric", "error"], "usage", "mean_layer_error"),
        (["--metric", "predicted_kl"], "trace-lacks", "no gradients"),
        (["--reference", "snapkv", "--axes", "temperature"], "usage", "none of these axes"),
        (["--reference", "nobody"], "policy-unknown", "nobody"),
        (["--evaluate", "past"], "usage", "live"),
        (["-r", "1.5"], "usage", "outside"),
        (["--layers", "9"], "usage", "no layer 9"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(
    arguments: list[str], code: str, words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["ablate", str(TINY), *arguments, "-o", str(tmp_path / "out")]) == 2
    err = capfd.readouterr().err
    assert f"[{code}]" in err
    assert words in err
    assert not (tmp_path / "out").exists()


def test_levels_without_effect_are_named_once(study: Result) -> None:
    everything = ablate(TINY, axes="temperature", ratios=["0"], sinks=1, window=8)
    (block,) = blocks(everything)
    assert block.effects == []
    assert verdicts(block) == ["ratio 0: no axis changes which tokens stay"]
    text = " ".join(str(part) for part in ablate_tables(everything))
    assert "Keep exactly the reference's tokens: tau=1, tau=0.5, tau=2, tau=5." in text
