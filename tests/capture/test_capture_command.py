"""`kvtool capture` as typed: the answer on stdout, the rest on stderr, exit codes, estimates."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from kvtool.cli.main import run
from kvtool.trace import open_trace


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("Sphinx of black quartz, judge my vow. " * 6)
    return str(path)


def disk(path):
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def test_a_summary_on_stdout_and_the_check_on_stderr(folder, tmp_path, text_file, capsys):
    out = tmp_path / "run.zarr"
    words = ["capture", str(folder("llama")), "-o", str(out), "--text-file", text_file]
    assert run([*words, "--prompt-tokens", "100", "--eval-tokens", "20"]) == 0
    said = capsys.readouterr()
    assert "100 tokens of prompt + 20 evaluated" in said.out
    assert open_trace(out).digest[:12] in said.out
    *_, check, following = said.err.splitlines()
    assert check.startswith("checked: attention recomputed in float64")
    assert "bound 1e-05: float32 run stored as float32" in check
    assert following.startswith(f"next: kvtool replay {out}")
    assert len(said.err.splitlines()) == 2


def test_json(folder, tmp_path, capsys):
    out = tmp_path / "run.zarr"
    words = ["capture", str(folder("qwen3")), "-o", str(out), "--prompt", "Hello there", "--max-new-tokens", "3"]
    assert run([*words, "--json", "--dtype", "bf16"]) == 0
    said = capsys.readouterr()
    document = json.loads(said.out)
    assert document["schema"] == "kvtool.capture/1"
    assert document["digest"] == open_trace(out).digest
    assert document["layers"] == [0, 1, 2]
    assert document["stored_dtype"] == "bfloat16"
    assert document["recomputed_error"] < document["recomputed_bound"] == 1e-2
    (sequence,) = document["sequences"]
    assert sequence["prompt_tokens"] == 11
    assert sequence["stopped"] in ("length", "end-of-text")
    assert "note: queries, keys and values of the float32 run are rounded to bfloat16" in said.err


@pytest.mark.parametrize("name", ["llama", "gemma3", "gemma3n", "deepseek_v3", "gpt_oss", "qwen3_next", "gpt2"])
@pytest.mark.parametrize("queries", ["all", "last:20"])
def test_the_estimate_is_within_two_percent_of_the_disk(folder, tmp_path, text_file, capsys, name, queries):
    words = ["capture", str(folder(name)), "--text-file", text_file, "--prompt-tokens", "150", "--eval-tokens", "50"]
    words += ["--queries", queries]
    assert run([*words, "--dry-run", "--json"]) == 0
    estimate = json.loads(capsys.readouterr().out)
    out = tmp_path / "run.zarr"
    assert not out.exists()
    assert estimate["schema"] == "kvtool.capture-estimate/1"
    assert estimate["tokens"] == 200
    assert run([*words, "-o", str(out)]) == 0
    assert estimate["disk_bytes"] == pytest.approx(disk(out), rel=0.02)
    assert estimate["memory_bytes"] > estimate["weight_bytes"] > 0


def test_dry_run_for_people(folder, text_file, capsys):
    words = ["capture", str(folder("llama")), "--text-file", text_file, "--prompt-tokens", "150", "--eval-tokens", "50"]
    assert run([*words, "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["tokens", "disk", "memory"]
    assert "150 of prompt, 200 at most" in lines[0]


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--prompt", "x"], "usage"),
        (["-o", "{out}"], "usage"),
        (["-o", "{out}", "--prompt", "x", "--prompt-file", "y"], "usage"),
        (["-o", "{out}", "--prompt", "x", "--layers", "0,9"], "usage"),
        (["-o", "{out}", "--prompt", "x", "--max-new-tokens", "0"], "usage"),
        (["-o", "{out}", "--prompt-file", "/no/such"], "file-missing"),
        (["-o", "{out}", "--text-file", "{text}", "--prompt-tokens", "900", "--eval-tokens", "1"], "prompt"),
        (["-o", "{out}", "--prompt", "x", "--max-new-tokens", "400"], "prompt"),
        (["-o", "{out}", "--prompt", "x", "--max-memory", "1MB"], "memory"),
        (["-o", "{out}", "--prompt", "x", "--dtype", "int4"], "usage"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_2(folder, tmp_path, text_file, capsys, words, code):
    out = tmp_path / "run.zarr"
    words = [word.format(out=out, text=text_file) for word in words]
    assert run(["capture", str(folder("llama")), *words]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert said.err.splitlines()[0].endswith(f"[{code}]")
    assert len(said.err.splitlines()) <= 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text.txt"]


def test_help_is_light():
    """Neither torch nor zarr nor transformers for --help."""
    code = (
        "import sys\nfrom kvtool.cli.main import run\nassert run(['capture', '--help']) == 0\n"
        "print([m for m in ('torch', 'zarr', 'transformers', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "--text-file" in done.stdout


def test_stderr_is_clean_in_a_process_of_its_own(folder, tmp_path):
    """No bars, warnings or log lines of the libraries below."""
    words = [sys.executable, "-m", "kvtool", "capture", str(folder("gpt_oss")), "-o", str(tmp_path / "run.zarr")]
    code = "from kvtool.cli.main import main; main()"
    words = [sys.executable, "-c", code, *words[3:], "--prompt", "Hello", "--max-new-tokens", "2"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    lines = done.stderr.splitlines()
    assert [line.split(":")[0] for line in lines] == ["checked", "next"]


def test_every_option_is_documented():
    """docs/capture.md against the command's signature."""
    import inspect
    from pathlib import Path

    from kvtool.cli.capture import command

    page = (Path(__file__).resolve().parents[2] / "docs" / "capture.md").read_text()
    names = {name.replace("_", "-") for name in inspect.signature(command).parameters}
    names = names - {"model", "output", "as-json", "output-projection"} | {"json", "no-output-projection"}
    assert [name for name in sorted(names) if f"--{name}" not in page] == []
    assert "-o run.zarr" in page


def test_a_model_whose_sizes_depend_on_values_is_loaded_for_its_estimate(folder, capsys, monkeypatch):
    words = ["capture", str(folder("gemma3n")), "--prompt", "Hello", "--dry-run", "--json"]
    assert run(words) == 0
    bare = json.loads(capsys.readouterr().out)
    monkeypatch.setattr("kvtool.capture.dry_run.meta_shapes", lambda model: None)
    assert run(words) == 0
    assert json.loads(capsys.readouterr().out) == bare
    assert run([*words, "--max-memory", "10kB"]) == 2
    assert "the weights alone take" in capsys.readouterr().err


def test_an_absent_package_is_named(folder, tmp_path, capsys, monkeypatch):
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "transformers" else find(name))
    assert run(["capture", str(folder("llama")), "-o", str(tmp_path / "r.zarr"), "--prompt", "x"]) == 2
    said = capsys.readouterr().err
    assert "needs the package transformers" in said
    assert "kvtool[capture]" in said


def test_a_bar_is_drawn_on_a_terminal_only(folder, tmp_path):
    """With rate and time left; a pseudo-terminal as stderr."""
    import os
    import pty

    leader, follower = pty.openpty()
    code = "from kvtool.cli.main import main; main()"
    words = [
        "capture",
        str(folder("llama")),
        "-o",
        str(tmp_path / "r.zarr"),
        "--prompt",
        "Hi",
        "--max-new-tokens",
        "200",
    ]
    process = subprocess.Popen([sys.executable, "-c", code, *words], stdout=subprocess.PIPE, stderr=follower)
    os.close(follower)
    said = b""
    try:
        while part := os.read(leader, 65536):
            said += part
    except OSError:  # the other end is closed
        pass
    out, _ = process.communicate()
    assert process.returncode == 0
    assert b"generated" in out
    assert b"\x1b" not in out
    assert b"capturing" in said
    assert b"tokens/s" in said
