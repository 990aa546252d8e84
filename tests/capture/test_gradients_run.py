"""`capture --gradients` as a whole: the trace, the options, the estimate, failures."""

from __future__ import annotations

import json
import resource
import subprocess
import sys

import pytest
import torch

from kvtool.capture import capture
from kvtool.cli.main import run
from kvtool.errors import KvtoolError
from kvtool.layer import Gradients
from kvtool.trace import open_trace

TEXT = "Sphinx of black quartz, judge my vow. The five boxing wizards jump quickly. " * 3


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def forced(folder, tmp_path, text_file, name="llama", out="run.zarr", **options):
    options = {"prompt_tokens": 60, "eval_tokens": 13, "gradients": 2, **options}
    return capture(folder(name), tmp_path / out, text_file=text_file, **options)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gemma3n", "gpt_oss", "deepseek_v3", "qwen3_next", "gpt2"])
def test_the_ordinary_run_is_untouched(folder, tmp_path, text_file, name):
    """Queries, keys, values, samples and projections, bit by bit, and nothing but gradients is new."""
    plain = forced(folder, tmp_path, text_file, name, out="plain.zarr", gradients=None)
    drawn = forced(folder, tmp_path, text_file, name)
    assert drawn.layer_ids == plain.layer_ids
    a, b = plain.tree.arrays, drawn.tree.arrays
    new = {path.rsplit("/", 1)[1] for path in set(b) - set(a)}
    assert set(a) <= set(b)
    assert new == {"output_gradients", "gradient_steps"}
    for path in a:
        assert all((plain.path / f).read_bytes() == (drawn.path / f).read_bytes() for f in files(plain, path))


def files(trace, path):
    return [name for name in trace.commit.entries if name.startswith(f"{path}/c/")]


def test_what_the_trace_says(folder, tmp_path, text_file):
    trace = forced(folder, tmp_path, text_file, "qwen3", gradients=3, seed=11, layers="0,2")
    (sequence,) = trace.sequences
    assert sequence.gradients == Gradients(3, 13, "continuation", (60, 73), 13, 11, "signs")
    assert trace.manifest["capture"]["gradients"] == 3
    for layer_id in (0, 2):
        layer = sequence.layer(layer_id)
        assert layer.gradients == sequence.gradients
        assert layer.gradient_steps.tolist() == list(range(60, 73))
        assert layer.output_gradients.shape == (3, 4, 13, 24)
        assert float(layer.output_gradients.norm()) > 0
    whole = forced(folder, tmp_path, text_file, "qwen3", out="whole.zarr", gradients=3, seed=11)
    found = whole.sequences[0].layer(2).output_gradients
    assert float((sequence.layer(2).output_gradients - found).norm() / found.norm()) < 1e-5


def test_chunks_of_the_run_do_not_matter(folder, tmp_path, text_file):
    one = forced(folder, tmp_path, text_file, "mistral").sequences[0].layer(0).output_gradients
    other = forced(folder, tmp_path, text_file, "mistral", out="b.zarr", chunk=5).sequences[0].layer(0).output_gradients
    assert float((one - other).norm() / one.norm()) < 1e-3


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3_next"])
def test_generated_text_has_the_gradients_of_the_same_text_given(folder, tmp_path, record, name):
    """A generation and teacher forcing on what it wrote draw the same: one text, one set of gradients."""
    from kvtool.capture.gradient_plan import GradientPlan
    from kvtool.capture.gradients import draw_gradients
    from kvtool.capture.loading import load_config, load_model
    from kvtool.capture.probe import probe
    from kvtool.capture.source import find_source

    trace = capture(
        folder(name),
        tmp_path / "g.zarr",
        prompt="Hello there, wizard",
        max_new_tokens=9,
        temperature=1.0,
        gradients=2,
        seed=3,
    )
    (sequence,) = trace.sequences
    from kvtool.capture.generation import Feed

    source = find_source(str(folder(name)))
    model = load_model(source, load_config(source), torch.float32)
    tokens = sequence.tokens.tolist()
    feed = Feed(model)
    feed.push(tokens[: sequence.prompt_length])
    geometries = {layer: entry.geometry for layer, entry in probe(model).items()}
    plan, prompt = GradientPlan(2, seed=3), sequence.prompt_length
    ran = record(model, [tokens[:prompt], tokens[prompt:]], kept=plan.differentiated(prompt)).ran
    drawn = draw_gradients(model, feed, plan, tokens, prompt, geometries, ran)
    assert sequence.gradients == drawn.how
    for layer, array in drawn.arrays.items():
        assert torch.equal(sequence.layer(layer).output_gradients, array)


def test_several_prompts_have_draws_of_their_own(folder, tmp_path):
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "abcdef", "id": "a"}\n{"prompt": "ghijklmn", "id": "b"}\n')
    trace = capture(folder("llama"), tmp_path / "a.zarr", prompts=prompts, max_new_tokens=5, gradients=2)
    prompts.write_text('{"prompt": "ghijklmn", "id": "b"}\n')
    alone = capture(folder("llama"), tmp_path / "b.zarr", prompts=prompts, max_new_tokens=5, gradients=2)
    assert trace.sequences[0].gradients.targets == (6, 11)
    assert torch.equal(trace.sequences[1].layer(1).output_gradients, alone.sequences[0].layer(1).output_gradients)


@pytest.mark.parametrize(("dtype", "bound"), [("float16", 4e-4), ("bfloat16", 3e-3)])
def test_a_narrower_stored_dtype_rounds_and_nothing_else(folder, tmp_path, text_file, dtype, bound):
    exact = forced(folder, tmp_path, text_file)
    narrow = forced(folder, tmp_path, text_file, out="narrow.zarr", dtype=dtype)
    for layer in exact.layer_ids:
        a, b = (trace.sequences[0].layer(layer).output_gradients for trace in (exact, narrow))
        assert torch.equal(b, a.to(getattr(torch, dtype)).float())
        assert float((a - b).norm() / a.norm()) < bound


def test_a_run_in_bfloat16(folder, tmp_path, text_file):
    trace = forced(folder, tmp_path, text_file, model_dtype="bfloat16")
    assert trace.stored_dtype == torch.bfloat16
    assert float(trace.sequences[0].layer(0).output_gradients.norm()) > 0


def test_a_dynamic_rotation_is_not_run_in_one_block(folder, tmp_path):
    """Every generated token turned its key by another table: as one block the model is another one."""
    words = {"prompt": "a" * 60, "max_new_tokens": 12, "gradients": 1}
    with pytest.raises(KvtoolError, match="when the evaluated steps run as blocks") as error:
        capture(folder("llama-dynamic"), tmp_path / "a.zarr", **words)
    assert error.value.code == "model-unsupported"
    assert not (tmp_path / "a.zarr").exists()
    trace = capture(folder("llama-dynamic"), tmp_path / "b.zarr", gradient_block=1, **words)
    assert trace.sequences[0].gradients.block == 1


@pytest.mark.parametrize(
    "options",
    [
        {"gradients_at": "prompt", "chunk": 20},
        {"gradients_at": "all", "chunk": 20},
        {"gradients_at": "all", "gradient_targets": "0:10", "gradient_block": 10},
        {"gradients_at": "prompt", "gradient_targets": "0:10", "gradient_block": 10},
        {"gradients_at": "prompt", "gradient_block": 10},
    ],
)
def test_a_dynamic_rotation_of_a_prompt_in_other_pieces_is_refused(folder, tmp_path, text_file, options):
    """Frequencies follow the length of a forward: pieces of other lengths are another model."""
    with pytest.raises(KvtoolError, match="when the evaluated steps run as blocks") as error:
        forced(folder, tmp_path, text_file, "llama-dynamic", **options)
    assert error.value.code == "model-unsupported"
    assert not (tmp_path / "run.zarr").exists()


@pytest.mark.parametrize(
    "options",
    [
        {"gradients_at": "prompt", "chunk": 20},
        {"gradients_at": "all", "gradient_targets": "0:10", "gradient_block": 10, "queries": "last:4"},
        {"gradients_at": "all", "chunk": 7, "gradient_block": 13, "model_dtype": "bfloat16"},
    ],
)
def test_pieces_do_not_matter_to_a_rotation_of_positions(folder, tmp_path, text_file, options):
    trace = forced(folder, tmp_path, text_file, "llama", **options)
    assert trace.sequences[0].gradients.at == options["gradients_at"]
    assert trace.sequences[0].gradient_steps.tolist() == list(range(60 if options["gradients_at"] == "prompt" else 73))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"gradients": None, "gradients_at": "all"}, "--gradients-at says how gradients are drawn, but none are"),
        ({"gradients": None, "gradient_block": 4}, "--gradient-block says how"),
        ({"gradients": None, "gradient_targets": "60:62"}, "--gradient-targets says how"),
        ({"gradients": 65537}, "--gradients 65537 is more than 65536 draws"),
        ({"gradients": 99999999999, "max_memory": "1GB"}, "--gradients 99999999999 is more than 65536 draws"),
        ({"gradients": 0}, "--gradients 0 is not at least 1"),
        ({"gradient_block": 0}, "--gradient-block 0 is not at least 1"),
        ({"gradients_at": "end"}, "--gradients-at end is not continuation, prompt or all"),
        ({"gradient_targets": "60"}, "--gradient-targets 60 is not LO:HI"),
        ({"gradient_targets": "62:62"}, "--gradient-targets 62:62 is not LO:HI"),
        ({"gradient_targets": "59:62"}, "59:62 reaches beyond the evaluated steps, 60:73"),
        ({"gradient_targets": "60:74"}, "60:74 reaches beyond the evaluated steps, 60:73"),
        ({"gradient_targets": "60:61", "gradients_at": "prompt"}, "evaluated steps, 0:60"),
    ],
)
def test_options_that_make_no_sense(folder, tmp_path, text_file, options, sentence):
    with pytest.raises(KvtoolError, match=sentence) as error:
        forced(folder, tmp_path, text_file, **options)
    assert error.value.code == "usage"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text.txt"]


def test_targets_beyond_a_generation(folder, tmp_path):
    words = {"prompt": "Hello", "max_new_tokens": 3, "gradients": 1, "gradient_targets": "6:20"}
    with pytest.raises(KvtoolError, match="6:20 reaches beyond the evaluated steps"):
        capture(folder("llama"), tmp_path / "a.zarr", **words)
    assert not (tmp_path / "a.zarr").exists()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", []),
        ("llama", ["--gradients-at", "all"]),
        ("gemma3n", ["--gradients-at", "prompt", "--dtype", "bf16"]),
        ("qwen3_next", ["--layers", "3"]),
    ],
)
def test_the_estimate_counts_gradients(folder, tmp_path, text_file, capsys, name, options):
    words = ["capture", str(folder(name)), "--text-file", str(text_file), "--prompt-tokens", "150"]
    words += ["--eval-tokens", "50", "--gradients", "3", *options]
    assert run([*words, "--dry-run", "--json"]) == 0
    estimate = json.loads(capsys.readouterr().out)
    out = tmp_path / "run.zarr"
    assert run([*words, "-o", str(out)]) == 0
    disk = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    assert estimate["disk_bytes"] == pytest.approx(disk, rel=0.02)


def test_inspect_shows_them(folder, tmp_path, text_file, capsys):
    forced(folder, tmp_path, text_file, gradient_targets="62:70", gradient_block=5)
    assert run(["inspect", str(tmp_path / "run.zarr"), "--json"]) == 0
    (sequence,) = json.loads(capsys.readouterr().out)["sequences"]
    assert sequence["gradients"] == {
        "draws": 2,
        "block": 5,
        "at": "continuation",
        "targets": [62, 70],
        "steps": 8,
        "seed": 0,
        "probe": "signs",
    }
    assert all(layer["output_gradients"] for layer in sequence["layers"])
    assert run(["inspect", str(tmp_path / "run.zarr"), "--verify"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "2 draws of signs behind steps 62:70 (continuation, blocks of 5)" in shown
    assert "output_gradients" in shown


@pytest.mark.model
def test_memory_of_512_steps_of_smollm2(tmp_path):
    """Below 6 GiB with everything, in a process of its own."""
    (tmp_path / "text.txt").write_text(
        "\n".join(f"Line {i} tells of {i * i} ships and {i % 7} whales." for i in range(60))
    )
    code = "from kvtool.cli.main import main; main()"
    words = ["capture", "smollm2", "--text-file", str(tmp_path / "text.txt"), "--prompt-tokens", "128"]
    words += [
        "--eval-tokens",
        "512",
        "--gradients",
        "1",
        "--threads",
        "1",
        "--no-output-projection",
        "-o",
        str(tmp_path / "run.zarr"),
    ]
    subprocess.run([sys.executable, "-c", code, *words], check=True, capture_output=True)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    assert peak < 6 << 30
    assert open_trace(tmp_path / "run.zarr").sequences[0].layer(29).output_gradients.shape == (1, 9, 512, 64)
