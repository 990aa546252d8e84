"""What `kvtool synth` writes is a sound trace, the same every time, and says what it holds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kvtool
from kvtool.cli.main import run
from kvtool.errors import KvtoolError
from kvtool.layer import Geometry
from kvtool.replay import replay
from kvtool.synth.table import CONSTRUCTIONS
from kvtool.trace import TraceWriter, open_trace

SMALL = {"prompt": 64, "steps": 8, "layers": 1}  # the least


@pytest.mark.parametrize("name", CONSTRUCTIONS)
def test_a_trace_is_sound_and_serves_every_policy(name, tmp_path, capfd):
    path = tmp_path / "run.zarr"
    assert run(["synth", name, "-o", str(path), "--dtype", "float16", *["--prompt", "200", "--steps", "24"]]) == 0
    assert "the right answer: keep row" in capfd.readouterr().out
    assert run(["inspect", str(path), "--verify", "--json"]) == 0
    shown = json.loads(capfd.readouterr().out)
    assert all(row["ok"] and row["error"] < 1e-5 for row in shown["verify"]["recompute"])
    assert all(row["ok"] for row in shown["serving"] if row["kind"] == "policy")
    (sequence,) = shown["sequences"]
    assert sequence["synthetic"]["name"] == name
    assert sequence["landmarks"]
    found = replay(path, ["all"], ratios=["0.5"])
    policies = {c["policy"] for c in found.entries("cells")}
    assert policies >= {"snapkv", "jacap", "expected-attention", "oracle-mass"}
    assert not [w for w in found.warnings if "left out" in w]


@pytest.mark.parametrize("name", CONSTRUCTIONS)
def test_same_arguments_same_bytes_and_another_seed_others(name, tmp_path):
    first = kvtool.synth(name, tmp_path / "a.zarr", **SMALL)
    again = kvtool.synth(name, tmp_path / "other-name.zarr", **SMALL)
    other = kvtool.synth(name, tmp_path / "c.zarr", seed=1, **SMALL)
    assert first.digest == again.digest != other.digest
    assert not torch.equal(first.sequences[0].array("keys", 0), other.sequences[0].array("keys", 0))


def test_threads_do_not_change_a_bit(tmp_path):
    one = kvtool.synth("needle", tmp_path / "one.zarr", layers=1)
    torch.set_num_threads(2)
    two = kvtool.synth("needle", tmp_path / "two.zarr", layers=1)
    assert one.digest == two.digest


def test_heads_layers_and_sequences_differ_in_their_noise(tmp_path):
    trace = kvtool.synth("needle", tmp_path / "run.zarr", prompt=96, steps=16, depths=[0.25, 0.5])
    arrays = [s.array("keys", layer)[head, 90] for s in trace.sequences for layer in (0, 1) for head in (0, 1)]
    assert all(not torch.equal(x, y) for i, x in enumerate(arrays) for y in arrays[:i])


def test_sizes_are_as_asked(tmp_path):
    trace = kvtool.synth("heavy-sink", tmp_path / "run.zarr", layers=3, heads=6, kv_heads=3, dim=48, dtype="bfloat16")
    layer = trace.sequences[0].layer(2)
    assert layer.queries.shape == (6, 640, 48)
    assert layer.keys.shape == layer.values.shape == (3, 640, 48)
    assert layer.output_projection is not None
    assert trace.stored_dtype == torch.bfloat16
    assert (trace.sequences[0].prompt_length, trace.layer_ids) == (512, [0, 1, 2])
    assert layer.geometry.rotation.rotary_dims == 24


def test_one_sequence_for_every_depth_and_length(tmp_path):
    trace = kvtool.synth("needle", tmp_path / "run.zarr", layers=1, steps=8, depths=[0, 0.5, 1], lengths=[64, 128])
    found = [(s.synthetic["depth"], s.prompt_length, s.landmarks["needle"]) for s in trace.sequences]
    assert found == [
        (0, 64, [8]),
        (0, 128, [8]),
        (0.5, 64, [32]),
        (0.5, 128, [64]),
        (1, 64, [63]),
        (1, 128, [127]),
    ]
    assert trace.sequences[2].text(32) == "needle "


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["neddle"], "did you mean needle? known: "),
        (["zzz"], "known: "),
        (["needle", "--depths", "1.2"], "a depth of 1.2 lies outside 0 to 1"),
        (["needle", "--depths", "nan"], "a depth of nan lies outside 0 to 1"),
        (["needle", "--depths", "deep"], "a depth is a number"),
        (["needle", "--depths", "0.5,0.50"], "names the same value twice"),
        (["needle", "--lengths", "256,63"], "a prompt of 63 is out of range"),
        (["needle", "--lengths", "2.5"], "2.5"),
        (["phase-shift", "--depths", "0.5"], "belong to needle"),
        (["phase-shift", "--prompt", "10"], "a prompt of 10 is out of range"),
        (["phase-shift", "--steps", "3"], "--steps of 3"),
        (["phase-shift", "--heads", "3"], "3 query heads cannot share 2"),
        (["phase-shift", "--dim", "30"], "--dim 30"),
        (["phase-shift", "--dtype", "int8"], "int8 cannot be stored"),
    ],
)
def test_bad_input_is_one_sentence_and_writes_nothing(words, message, tmp_path, capfd):
    assert run(["synth", *words, "-o", str(tmp_path / "run.zarr")]) == 2
    said = capfd.readouterr().err
    assert message in said
    assert "[internal]" not in said
    assert list(tmp_path.iterdir()) == []


def test_an_existing_trace_is_replaced_only_by_force(tmp_path, capfd):
    path = tmp_path / "run.zarr"
    first = kvtool.synth("heavy-sink", path, **SMALL)
    with pytest.raises(KvtoolError, match="already"):
        kvtool.synth("heavy-sink", path, seed=5, **SMALL)
    assert open_trace(path).digest == first.digest
    assert kvtool.synth("heavy-sink", path, seed=5, force=True, **SMALL).digest != first.digest


def test_a_killed_writer_leaves_no_half_trace(tmp_path):
    path = tmp_path / "run.zarr"
    code = (
        "import os, signal, kvtool, kvtool.synth.write as w\n"
        "paint, calls = w.paint, []\n"
        "def stop(*given):\n"
        "    calls.append(1)\n"
        "    if len(calls) == 3:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return paint(*given)\n"
        "w.paint = stop\n"
        f"kvtool.synth('needle', {str(path)!r}, depths=[0.2, 0.8], prompt=96, steps=16)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env=dict(os.environ), capture_output=True)
    assert done.returncode == -signal.SIGKILL
    with pytest.raises(KvtoolError, match="1 of 2 sequences whole"):
        open_trace(path)
    kvtool.synth("needle", path, depths=[0.2, 0.8], prompt=96, steps=16)
    assert [p.name for p in tmp_path.iterdir()] == ["run.zarr"]


def test_every_construction_is_named_in_help_and_docs(capfd):
    assert run(["synth", "--help"]) == 0
    shown = " ".join(capfd.readouterr().out.replace("│", " ").split())
    page = (Path(__file__).resolve().parents[2] / "docs" / "synth.md").read_text()
    assert [name for name in CONSTRUCTIONS if name not in shown or f"| `{name}` |" not in page] == []


def write(path: Path, attributes: dict[str, object]) -> None:
    with TraceWriter(path, model={}, tokenizer=None, capture={}, dtype=torch.float32) as writer:
        sequence = writer.sequence({0: Geometry(0, 2, 1, 8, 8, 1.0)}, prompt_length=4, attributes=attributes)
        block = torch.ones(1, 6, 8)
        sequence.append(0, keys=block, values=block, queries=block.expand(2, 6, 8), query_steps=torch.arange(6))
        sequence.finish(tokens=torch.zeros(6), positions=torch.arange(6))


@pytest.mark.parametrize(
    "attributes",
    [
        {"landmarks": {"a": [3, 2]}},
        {"landmarks": {"a": [2, 2]}},
        {"landmarks": {"a": [6]}},
        {"landmarks": {"a": [-1]}},
        {"landmarks": {"a": []}},
        {"landmarks": {"a": [True]}},
        {"landmarks": {"a": [1.0]}},
        {"landmarks": {"": [1]}},
        {"landmarks": [1]},
        {"landmarks": {}},
        {"synthetic": {"name": "x", "seed": 0}},
        {"synthetic": {"name": "x", "seed": 0.5, "answer": "y"}},
        {"synthetic": {"name": "x", "seed": 0, "answer": 3}},
        {"synthetic": {"name": "x", "seed": 0, "answer": "y", "depth": 2}},
        {"synthetic": {"name": "x", "seed": 0, "answer": "y", "other": 2}},
    ],
)
def test_landmarks_that_lie_are_refused(attributes, tmp_path):
    with pytest.raises(KvtoolError, match=r"landmark|synthetic"):
        write(tmp_path / "run.zarr", attributes)
    assert not (tmp_path / "run.zarr").exists()


def test_the_digest_covers_landmarks(tmp_path):
    for name, rows in (("a", [1, 2]), ("b", [1, 3])):
        write(tmp_path / name, {"landmarks": {"x": rows}})
    assert open_trace(tmp_path / "a").digest != open_trace(tmp_path / "b").digest
    assert open_trace(tmp_path / "a").sequences[0].landmarks == {"x": [1, 2]}
