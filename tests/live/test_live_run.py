"""Whole live runs: measured numbers by brute force, decisions as in replay, refusals, results."""

from __future__ import annotations

import errno
import json
import math
import shutil

import google_crc32c
import numpy as np
import pytest
import torch

import kvtool
from kvtool.cli.main import run as command
from kvtool.errors import KvtoolError
from kvtool.live import closed_loop, live
from kvtool.metrics.declared import FAMILIES, taken
from kvtool.replay import replay
from kvtool.result import LIVE, SCHEMAS, Result
from kvtool.trace.commit import file_entry, seal
from kvtool.trace.metadata import list_files

OPTIONS = {"ratios": ["0.5", "0.75"], "window": 6}


def brute_logits(model, tokens, evict, event):
    """Logits [T, V] of one plain forward whose 4D mask hides tokens evicted alike in every head and layer."""
    steps = torch.arange(len(tokens))
    seen = steps[None, :] <= steps[:, None]
    seen &= ~((evict[None, :] < len(tokens)) & (steps[:, None] >= event) & (evict[None, :] <= steps[:, None]))
    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens]), attention_mask=seen[None, None]).logits[0]


def kl_by_loop(p_logits, q_logits):
    total = 0.0
    p, q = p_logits.double().softmax(0).tolist(), q_logits.double().softmax(0).tolist()
    for a, b in zip(p, q, strict=True):
        total += a * (math.log(a) - math.log(b)) if a > 0 else 0.0
    return total


@pytest.fixture(scope="module")
def result(folder, traced):
    """A run of everything, on the llama of the capture tests."""
    answer = "wizards" if "wizards" in "".join(traced("llama").sequences[0].texts()[61:]) else "65:70"
    return live(
        folder("llama"),
        traced("llama"),
        ["streaming-llm:sinks=3", "snapkv:window=4", "oracle-mass"],
        calibrate=True,
        layer_errors=True,
        generate=6,
        answer=[answer],
        **OPTIONS,
    )


def cells(result, sequence=0):
    return {(c["policy"], c["ratio"]): c for c in result.entries("cells") if c["sequence"] == sequence}


def test_one_cell_by_brute_force(result, traced, tiny):
    """streaming-llm keeps the same tokens everywhere, so a single masked forward of the plain model is the truth."""
    sequence = traced("llama").sequences[0]
    tokens = sequence.tokens.tolist()
    (label,) = {p for p, _ in cells(result) if p.startswith("streaming-llm")}
    decided = [e for e in result.entries("evict_steps") if (e["policy"], e["ratio"]) == (label, 0.75)]
    assert len({tuple(e["evict_step"]) for e in decided}) == 1
    evict = torch.tensor(decided[0]["evict_step"])
    assert int((evict == 60).sum()) == 45
    model = tiny("llama")
    full = brute_logits(model, tokens, torch.full_like(evict, len(tokens)), 60)
    evicted = brute_logits(model, tokens, evict, 60)
    kl = [kl_by_loop(full[t], evicted[t]) for t in range(60, 73)]
    cell = cells(result)[label, 0.75]
    assert cell["measured_kl"] == pytest.approx(sum(kl) / 13, rel=1e-3)
    assert cell["measured_kl_max"] == pytest.approx(max(kl), rel=1e-3)
    steps = [s for s in result.entries("steps") if (s["policy"], s["ratio"], s["sequence"]) == (label, 0.75, 0)]
    assert [s["step"] for s in steps] == list(range(60, 73))
    assert [s["kl"] for s in steps] == pytest.approx(kl, rel=2e-3, abs=1e-6)
    nll_full = [-float(full[t].double().log_softmax(0)[tokens[t + 1]]) for t in range(60, 72)]
    nll = [-float(evicted[t].double().log_softmax(0)[tokens[t + 1]]) for t in range(60, 72)]
    assert [s["nll"] for s in steps] == [*(pytest.approx(v, rel=1e-4) for v in nll), None]
    assert cell["delta_nll"] == pytest.approx((sum(nll) - sum(nll_full)) / 12, rel=1e-3, abs=1e-4)
    agree = [int(full[t].argmax()) == int(evicted[t].argmax()) for t in range(60, 73)]
    assert [s["top1_agrees"] for s in steps] == agree
    assert cell["top1_agreement"] == pytest.approx(sum(agree) / 13)
    low, high = result.manifest["live"]["answers"][0]["rows"]
    span = range(low - 61, high - 61)
    assert cell["answer_nll"] == pytest.approx(sum(nll[i] for i in span) / len(span), rel=1e-4)
    assert cell["answer_loss"] == pytest.approx(sum(nll[i] - nll_full[i] for i in span) / len(span), rel=1e-3)


def test_its_own_continuation_by_brute_force(result, traced, tiny, folder):
    """The last token's logits of ever longer masked forwards."""
    model, trace = tiny("llama"), traced("llama")
    (label,) = {p for p, _ in cells(result) if p.startswith("streaming-llm")}
    decided = [e for e in result.entries("evict_steps") if (e["policy"], e["ratio"]) == (label, 0.75)]
    gone = [i for i, step in enumerate(decided[0]["evict_step"]) if step == 60]
    tokens = trace.sequences[0].tokens.tolist()[:60]
    for _ in range(6):
        evict = torch.full((len(tokens),), len(tokens))
        evict[gone] = 60
        if len(tokens) == 60:
            evict[:] = 60  # as long as the sequence: never
        tokens.append(int(brute_logits(model, tokens, evict, 60)[-1].argmax()))
    from kvtool.capture.loading import load_tokenizer
    from kvtool.capture.source import find_source
    from kvtool.capture.tokenization import Tokenization

    pieces = Tokenization(load_tokenizer(find_source(str(folder("llama"))))).pieces(tokens[60:])
    assert cells(result)[label, 0.75]["generated"] == b"".join(pieces).decode(errors="replace")


def test_full_changes_nothing_and_decisions_are_those_of_replay(result, traced):
    for (policy, _), cell in cells(result).items():
        if policy == "full":
            assert cell["measured_kl"] < 1e-9
            assert cell["top1_agreement"] == 1.0
            assert cell["generated_same"] == 6
        else:
            assert cell["measured_kl"] > 1e-4
    opened = replay(traced("llama"), ["streaming-llm:sinks=3", "snapkv:window=4", "oracle-mass"], **OPTIONS)
    mine, theirs = (
        {(e["policy"], e["ratio"], e["layer"], e["kv_head"]): e["evict_step"] for e in r.entries("evict_steps")}
        for r in (result, opened)
    )
    assert mine == theirs
    assert len(mine) == 5 * 2 * 3 * 2
    for key, cell in cells(opened).items():
        beside = cells(result)[key]
        for column in ("mean_layer_error", "mean_output_error", "achieved", "ties", "candidates", "oracle"):
            assert beside[column] == cell[column]
    for row_column in ("cosine_distance", "evicted_mass"):
        for key, cell in cells(result).items():
            values = [row[row_column] for row in opened.entries("rows") if (row["policy"], row["ratio"]) == key]
            assert len(values) == 3 * 4
            assert cell[f"mean_{row_column}"] == pytest.approx(sum(values) / len(values), rel=1e-12, abs=1e-15)


def test_layer_0_errs_alike_in_both_loops_and_later_layers_do_not(result):
    by_layer = {0: [], 1: [], 2: []}
    for row in result.entries("rows"):
        if row["policy"] != "full":
            by_layer[row["layer"]].append(row["closed_output_error"] / row["output_error"] - 1)
    assert max(map(abs, by_layer[0])) < 1e-4
    assert max(map(abs, by_layer[1])) > 0.01
    assert max(map(abs, by_layer[2])) > 0.01
    for layer in result.entries("layers"):
        if layer["layer"] == 0 and layer["policy"] != "full":
            assert layer["closed_layer_error"] == pytest.approx(layer["layer_error"], rel=1e-4)


def test_calibration_holds_predictions_against_measurements(result):
    entries = {(e["measured"], e["predictor"]): e for e in result.entries("calibration")}
    assert {("measured_kl", "mean_layer_error"), ("answer_loss", "mean_output_error")} <= set(entries)
    entry = entries["measured_kl", "mean_layer_error"]
    assert entry["cells"] == 8  # four policies that evict, two ratios
    assert entry["pairs"] == 2 * 6
    assert -1 <= entry["spearman"] <= 1
    assert entry["ratio_median"] is None
    assert {p for m, p in entries if m == "measured_kl"} >= {"mean_cosine_distance", "mean_evicted_mass"}


def test_results_are_ordinary(result, tmp_path):
    result.save(tmp_path / "r")
    again = Result.load(tmp_path / "r")
    assert again.schema == LIVE
    assert set(again.tables) == set(SCHEMAS[LIVE])
    assert again.document() == result.document()
    text = json.dumps(result.document(), allow_nan=False)
    assert json.loads(text)["schema"] == "kvtool.live/1"
    for name in ("cells", "layers", "rows", "steps"):
        columns = result.tables[name].column_names
        assert columns[:8] == ["sequence", "policy", "ratio", "budget", "achieved", "schedule", "evaluate", "event"]
    mean = cells(result, None)
    one = cells(result)
    assert all(mean[key]["measured_kl"] == one[key]["measured_kl"] for key in one)


@pytest.mark.parametrize("name", ["gemma3", "gpt_oss", "deepseek_v3", "gemma3n", "qwen3_next", "gpt2", "llama4"])
def test_every_kind_of_model_runs(folder, traced, name):
    found = live(folder(name), traced(name), ["knorm"], layer_errors=True, calibrate=True, **OPTIONS)
    kl = {key: cell["measured_kl"] for key, cell in cells(found).items()}
    assert all(value < 1e-9 if policy == "full" else value > 1e-5 for (policy, _), value in kl.items())
    first = min(row["layer"] for row in found.entries("rows"))
    ratios = [
        row["closed_output_error"] / row["output_error"]
        for row in found.entries("rows")
        if row["layer"] == first and row["output_error"]
    ]
    assert ratios
    assert all(abs(ratio - 1) < 1e-3 for ratio in ratios)


def test_a_metric_by_name_is_held_against_the_measurement_too(folder, traced, tmp_path):
    source = """
from dataclasses import dataclass
from kvtool.metrics import Column, Metric

@dataclass(frozen=True)
class Twice(Metric):
    name = "twice"
    columns = (
        Column("twice_error", "cell", "relative L2", "lower", "twice the mean error"),
        Column("twice_size", "cell", "units", "none", "no predictor"),
    )

    def partial(self, errors, geometry, retained):
        heads = (errors.squared_error.sum(-1) / errors.squared_output.sum(-1)).sqrt()
        return {"heads": heads}

    def combine(self, partials):
        heads = [head for partial in partials for head in partial["heads"].tolist()]
        return {"twice_error": 2 * sum(heads) / len(heads), "twice_size": len(heads)}
"""
    (tmp_path / "twice.py").write_text(source)
    word = f"{tmp_path}/twice.py:Twice"
    found = live(folder("llama"), traced("llama"), ["knorm", "tova"], calibrate=True, metrics=[word], **OPTIONS)
    for cell in found.entries("cells"):
        if not cell["no_effect"]:
            assert cell["twice_error"] == pytest.approx(2 * cell["mean_output_error"], rel=1e-12, abs=1e-15)
    agreed = {entry["predictor"]: entry for entry in found.entries("calibration") if entry["sequence"] is None}
    assert "twice_size" not in agreed
    assert agreed["twice_error"]["cells"] > 2
    for number in ("spearman", "pairs", "wrong_pairs"):
        assert agreed["twice_error"][number] == agreed["mean_output_error"][number]
    assert found.manifest["metrics"]["twice"] == 1
    with pytest.raises(KvtoolError, match="none is made"):
        live(folder("llama"), traced("llama"), ["knorm"], metrics=[word], **OPTIONS)


def test_every_column_of_a_live_run_is_taken(result):
    """So that no metric of another package can have one."""
    known = taken()
    for name, table in result.tables.items():
        free = [c for c in table.column_names if c not in known and not c.startswith(FAMILIES)]
        assert free == [], name


def test_an_earlier_event_and_chunks(folder, traced):
    trace = traced("llama")
    found = [live(folder("llama"), trace, ["knorm"], evict_at=41, chunk=chunk, **OPTIONS) for chunk in (None, 7, 1)]
    for other in found[1:]:
        for key, cell in cells(found[0]).items():
            assert cells(other)[key]["measured_kl"] == pytest.approx(cell["measured_kl"], rel=1e-3, abs=1e-9)
    assert next(iter(cells(found[0]).values()))["evaluated_steps"] == 73 - 41
    assert {c["schedule"] for c in found[0].entries("cells")} == {"at:41"}


def test_layers_that_the_trace_lacks_keep_everything(folder, traced, tiny):
    trace = traced("llama", layers="0,2")
    found = live(folder("llama"), trace, ["knorm"], layers=[2], layer_errors=True, calibrate=True, **OPTIONS)
    assert "layers 0-1 keep their whole cache" in found.warnings[0]
    # Only the last layer evicts: its inputs are the full run's, so both loops see the same.
    for row in found.entries("rows"):
        assert row["layer"] == 2
        assert row["closed_output_error"] == pytest.approx(row["output_error"], rel=1e-4, abs=1e-7)


def test_an_answer_behind_the_sequence(folder, traced, tiny):
    said = []
    trace = traced("llama")
    found = live(folder("llama"), trace, ["knorm"], answer=["0451"], notes=said.append, **OPTIONS)
    assert found.manifest["live"]["answers"] == [{"sequence": 0, "rows": [73, 77]}]
    assert any("fed behind the last row" in note for note in said)
    cell = cells(found)["full", 0.5]
    assert cell["evaluated_steps"] == 13
    from kvtool.capture.loading import load_tokenizer
    from kvtool.capture.source import find_source
    from kvtool.capture.tokenization import Tokenization

    answer = Tokenization(load_tokenizer(find_source(str(folder("llama"))))).encode_bare("0451")
    tokens = trace.sequences[0].tokens.tolist() + answer
    with torch.no_grad():
        logs = tiny("llama")(input_ids=torch.tensor([tokens])).logits[0].double().log_softmax(-1)
    expected = -sum(float(logs[t, tokens[t + 1]]) for t in range(72, 76)) / 4
    assert cell["answer_nll_full"] == pytest.approx(expected, rel=1e-4)
    without = live(folder("llama"), trace, ["knorm"], **OPTIONS)
    for key, other in cells(without).items():
        assert cells(found)[key]["measured_kl"] == pytest.approx(other["measured_kl"], rel=1e-3, abs=1e-9)
        assert other["answer_loss"] is None


def test_other_models_are_refused(folder, traced):
    trace = traced("llama")
    with pytest.raises(KvtoolError, match="was captured with weights") as caught:
        live(folder("stablelm"), trace, ["knorm"])
    assert caught.value.code == "model-differs"
    with pytest.raises(KvtoolError) as caught:  # same shapes, other weights
        live(folder("stablelm"), trace, ["knorm"], other_weights=True)
    assert caught.value.code == "model-differs"
    assert "the keys of layer 0" in caught.value.message
    with pytest.raises(KvtoolError, match="layer 0 has key_dim 24"):
        live(folder("qwen3"), trace, ["knorm"], other_weights=True)


def altered(trace, tmp_path, change):
    """The trace with the attributes of one sequence's groups changed, sealed again."""
    path = tmp_path / "altered.zarr"
    shutil.copytree(trace.path, path)
    change(path / "sequences" / "0000")
    (path / "COMMIT.json").write_bytes(seal({name: file_entry(path / name) for name in list_files(path)})[0])
    return path


@pytest.mark.parametrize(
    ("name", "word", "value"),
    [("llama", "scale", 0.31), ("gemma2", "softcap", 20.0), ("mistral", "window", 5), ("mistral", "kind", "chunked")],
)
def test_layers_that_are_not_the_models_are_refused(folder, traced, tmp_path, name, word, value):
    def change(sequence):
        group = sequence / "layers" / "00" / "zarr.json"
        document = json.loads(group.read_text())
        assert word in document["attributes"]["kvtool"]
        document["attributes"]["kvtool"][word] = value
        group.write_text(json.dumps(document))

    with pytest.raises(KvtoolError, match=f"layer 0 has {word}") as caught:
        live(folder(name), altered(traced(name), tmp_path, change), ["knorm"], ratios=["0.5"])
    assert caught.value.code == "model-differs"


def test_another_continuation_than_the_captured_one_is_refused(folder, traced, tmp_path):
    """Decisions come from the rows before the event, but the replay's queries come from those after it."""

    def change(sequence):
        tokens = next(sequence.glob("tokens/c/0"))
        raw = bytearray(tokens.read_bytes())
        numbers = np.frombuffer(raw[:-4], dtype="<i4").copy()
        numbers[62] = 7 if numbers[62] != 7 else 8
        fresh = numbers.tobytes()
        tokens.write_bytes(fresh + google_crc32c.value(fresh).to_bytes(4, "little"))

    with pytest.raises(KvtoolError, match="computes for rows 60:73") as caught:
        live(folder("llama"), altered(traced("llama"), tmp_path, change), ["knorm"], ratios=["0.5"])
    assert caught.value.code == "model-differs"


def test_a_dynamic_rotation_starts_every_cell_from_the_same_state(folder, traced):
    """The rotary state that one cell leaves behind must not reach the next: each alone gives the same numbers."""
    trace = traced("llama-dynamic")
    # The model's own continuation is longer than the text, and stretches the rotation further.
    written = cells(live(folder("llama-dynamic"), trace, ["tova"], ratios=["0.5"], window=6, generate=40))
    alone = cells(live(folder("llama-dynamic"), trace, ["tova"], ratios=["0.5"], window=6))
    for key in (("tova", 0.5), ("random", 0.5), ("full", 0.5)):
        assert written[key]["measured_kl"] == alone[key]["measured_kl"]


def test_a_folder_with_another_runs_work_is_left_alone(folder, traced, tmp_path):
    (tmp_path / "r" / "parts" / "0000-000-abc").mkdir(parents=True)
    with pytest.raises(KvtoolError, match="unfinished work of kvtool replay") as caught:
        live(folder("llama"), traced("llama"), ["knorm"], ratios=["0.5"], output=tmp_path / "r")
    assert caught.value.code == "output-exists"
    assert (tmp_path / "r" / "parts" / "0000-000-abc").is_dir()


def test_a_result_that_was_cut_off_while_being_written_is_written_again(result, folder, traced, tmp_path):
    place = tmp_path / "r"
    (place / ".writing").mkdir(parents=True)
    (place / "cells.parquet").write_bytes(b"half")
    (place / "ages.parquet").write_bytes(b"of an older kind")
    found = live(folder("llama"), traced("llama"), ["knorm"], ratios=["0.5"], window=6, output=place)
    assert Result.load(place).document() == found.document()
    assert {p.name for p in place.iterdir()} == {"manifest.json", *(f"{name}.parquet" for name in SCHEMAS[LIVE])}


def test_a_full_disk_leaves_the_older_result(result, tmp_path, monkeypatch):
    place = tmp_path / "r"
    result.save(place)
    before = {p.name: p.read_bytes() for p in place.iterdir()}
    written = []

    def full(path, raw):
        written.append(path)
        if len(written) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        path.write_bytes(raw)

    monkeypatch.setattr(kvtool.result, "write_durably", full)
    with pytest.raises(KvtoolError, match="disk is full"):
        result.save(place)
    assert {p.name: p.read_bytes() for p in place.iterdir()} == before
    written.clear()
    with pytest.raises(KvtoolError, match="disk is full"):
        result.save(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_loop_that_does_not_reproduce_the_model_is_refused(folder, traced, monkeypatch, tmp_path):
    monkeypatch.setitem(closed_loop.BOUNDS, torch.float32, -1.0)
    with pytest.raises(KvtoolError, match="with nothing evicted") as caught:
        live(folder("llama"), traced("llama"), ["knorm"], output=tmp_path / "r")
    assert caught.value.code == "not-reproduced"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"answer": ["60:62"]}, "can answer in rows 61:73"),
        ({"answer": ["70:74"]}, "can answer in rows 61:73"),
        ({"answer": [" "]}, "--answer is empty"),
        ({"answer": ["a", "b"]}, "2 answers do not fit the number of sequences, 1"),
        ({"generate": -1}, "--generate -1"),
        ({"chunk": 0}, "--chunk 0"),
        ({"kl_windows": 8}, "--kl-window widens a prediction, but none is made"),
        ({"evict_at": 73}, "no query after it"),
        ({"model_dtype": "float8"}, "float8 is not a dtype"),
    ],
)
def test_bad_options(folder, traced, options, sentence):
    with pytest.raises(KvtoolError, match=sentence):
        live(folder("llama"), traced("llama"), ["knorm"], **options)


def test_the_command_prints_a_table_or_json(folder, traced, tmp_path, capsys):
    words = ["live", str(folder("llama")), str(traced("llama").path), "-p", "knorm", "-r", "0.5", "--calibrate"]
    assert command([*words, "-o", str(tmp_path / "r"), "--layer-errors", "--generate", "3"]) == 0
    said = capsys.readouterr()
    assert "measured KL" in said.out
    assert "ratio 0.5: " in said.out
    assert "knorm" in next(line for line in said.out.splitlines() if line.startswith("ratio 0.5: "))
    assert "No predicted KL: the trace has no gradients" in said.out
    assert "predicted against measured" in said.out
    assert "means over the cells that evict" in " ".join(said.out.split())
    assert said.err.splitlines()[-1].startswith("next: kvtool replay")
    assert Result.load(tmp_path / "r").schema == LIVE
    assert command([*words, "-o", str(tmp_path / "r")]) == 2
    assert "[output-exists]" in capsys.readouterr().err
    assert command([*words, "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["schema"] == "kvtool.live/1"
    assert command(["live", str(folder("qwen3")), str(traced("llama").path), "-p", "knorm"]) == 2
    assert "[model-differs]" in capsys.readouterr().err


def test_one_answer_needs_no_list(folder, traced):
    found = live(folder("llama"), traced("llama"), "knorm", ratios="0.5", window=6, answer="64:66")
    assert found.manifest["live"]["answers"] == [{"sequence": 0, "rows": [64, 66]}]


def test_the_python_door_is_a_function():
    assert callable(kvtool.live)
