"""Bad input of every kind: one sentence, a hint, exit code 2, nothing on stdout and nothing written."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvtool.cli.main import run
from kvtool.replay import replay

SAMPLES = Path(__file__).resolve().parents[2] / "sample_traces"
TINY = str(SAMPLES / "tiny-gqa.zarr")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("Only a few words here.")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "not-a-trace").mkdir()
    (tmp_path / "not-a-trace" / "zarr.json").write_text("{}")
    (tmp_path / "not.safetensors").write_bytes(b"nonsense")
    shutil.copytree(TINY, tmp_path / "incomplete.zarr.partial-999999")
    (tmp_path / "incomplete.zarr.partial-999999" / "COMMIT.json").unlink()
    shutil.copytree(TINY, tmp_path / "damaged.zarr")
    (tmp_path / "damaged.zarr" / "COMMIT.json").write_bytes(b"{}")
    return tmp_path


def everything(folder: Path) -> list[tuple[str, int]]:
    return sorted((str(p.relative_to(folder)), p.stat().st_size) for p in folder.rglob("*"))


BAD = {
    "no command of that name": ["repaly", "x"],
    "unknown option": ["replay", TINY, "--ration", "0.5"],
    "missing trace": ["replay", "nowhere.zarr", "-p", "knorm"],
    "not a trace": ["replay", "not-a-trace", "-p", "knorm"],
    "incomplete trace": ["replay", "incomplete.zarr", "-p", "knorm"],
    "the partial folder itself": ["inspect", "incomplete.zarr.partial-999999"],
    "damaged commit file": ["replay", "damaged.zarr", "-p", "knorm"],
    "unknown policy": ["replay", TINY, "-p", "snapkw"],
    "re-selecting method": ["replay", TINY, "-p", "quest"],
    "wrong parameter": ["replay", TINY, "-p", "snapkv:windw=3"],
    "wrong type": ["replay", TINY, "-p", "snapkv:window=many"],
    "ratio 1.5": ["replay", TINY, "-p", "knorm", "-r", "1.5"],
    "ratio word": ["replay", TINY, "-p", "knorm", "-r", "half"],
    "empty ratio": ["replay", TINY, "-p", "knorm", "-r", ","],
    "budget 0": ["replay", TINY, "-p", "knorm", "-b", "0"],
    "budget fraction": ["replay", TINY, "-p", "knorm", "-b", "3.5"],
    "huge budget": ["replay", TINY, "-p", "knorm", "-b", "99999999999999999999"],
    "huge sinks": ["replay", TINY, "-p", "knorm", "--sinks", "99999999999999999999"],
    "ratio of 5000 places": ["replay", TINY, "-p", "knorm", "-r", "1e-5000"],
    "ratio that cannot be expanded": ["replay", TINY, "-p", "knorm", "-r", "1e-999999999"],
    "ratio that prints as 1": ["replay", TINY, "-p", "knorm", "-r", "0.99999999999999999999"],
    "parameter nan": ["replay", TINY, "-p", "capkv:tau=nan"],
    "parameter huge": ["replay", TINY, "-p", "snapkv:window=99999999999999999999"],
    "budget with ratio": ["replay", TINY, "-p", "knorm", "-b", "3", "-r", "0.5"],
    "no query after the event": ["replay", TINY, "-p", "knorm", "--evict-at", "160"],
    "layer not there": ["replay", TINY, "-p", "knorm", "--layers", "0,9"],
    "layers nonsense": ["replay", TINY, "-p", "knorm", "--layers", "5-2"],
    "threads 0": ["replay", TINY, "-p", "knorm", "--threads", "0"],
    "output is a file": ["replay", TINY, "-p", "knorm", "-o", "text.txt"],
    "policy file missing": ["replay", TINY, "-p", "mine.py:Mine"],
    "inspect nothing": ["inspect", "nowhere.zarr"],
    "inspect a file": ["inspect", "text.txt"],
    "policies unknown": ["policies", "nonsense"],
    "import nothing": ["import", "nowhere.safetensors", "-o", "out.zarr"],
    "import nonsense": ["import", "not.safetensors", "-o", "out.zarr"],
    "capture without input": ["capture", "smollm2", "-o", "out.zarr"],
    "capture two inputs": ["capture", "smollm2", "--prompt", "a", "--prompt-file", "text.txt", "-o", "out.zarr"],
    "capture missing model": ["capture", "no/such/model", "--prompt", "a", "-o", "out.zarr"],
    "capture missing text": ["capture", "smollm2", "--prompt-file", "nowhere.txt", "-o", "out.zarr"],
    "capture empty text": ["capture", "smollm2", "--prompt-file", "empty.txt", "-o", "out.zarr"],
    "capture half a text mode": ["capture", "smollm2", "--text-file", "text.txt", "-o", "out.zarr"],
    "capture bad dtype": ["capture", "smollm2", "--prompt", "a", "--dtype", "int8", "-o", "out.zarr"],
    "capture bad queries": ["capture", "smollm2", "--prompt", "a", "--queries", "some", "-o", "out.zarr"],
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str, place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = everything(place)
    assert run(BAD[case]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    lines = err.rstrip("\n").split("\n")
    assert lines[0].startswith("error: ")
    assert lines[0].endswith("]")
    assert "internal" not in lines[0]
    assert len(lines) <= 2, err
    assert all(line.startswith("hint: ") for line in lines[1:])
    assert "Traceback" not in err
    assert everything(place) == before


def test_incomplete_says_how_much_is_whole(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["replay", "incomplete.zarr", "-p", "knorm"]) == 2
    assert "incomplete" in capfd.readouterr().err


def test_verbose_adds_the_traceback(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["-vv", "replay", "nowhere.zarr"]) == 2
    assert "Traceback" in capfd.readouterr().err


def test_json_is_one_document_on_stdout(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["replay", TINY, "-p", "knorm", "-r", "0.5", "--layers", "0", "--json"]) == 0
    out, err = capfd.readouterr()
    document = json.loads(out)
    assert document["schema"] == "kvtool.replay/1"
    assert {"manifest", "cells", "layers", "rows", "ages", "warnings"} <= set(document)
    assert err.rstrip().split("\n")[-1].startswith("next: kvtool")


def test_table_names_winner_and_open_loop(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["replay", TINY, "-p", "all", "-r", "0.5", "--window", "8"]) == 0
    out = capfd.readouterr().out
    cells = replay(TINY, ["all"], ratios=["0.5"], window=8).entries("cells")
    errors = {
        cell["policy"]: cell["mean_layer_error"]
        for cell in cells
        if cell["sequence"] is None and not cell["oracle"] and cell["policy"] not in ("full", "random")
    }
    best = min(errors, key=lambda policy: errors[policy])
    assert f"ratio 0.5: {best} keeps attention's output best, error {errors[best]:.4f}" in out
    assert "Open loop" in out
    assert "oracle-mass  (oracle)" in out


def test_broken_pipe_is_no_traceback() -> None:
    command = [sys.executable, "-c", "from kvtool.cli.main import main; main()", "policies"]
    reader = subprocess.Popen(["true"])
    reader.wait()
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_help_of_every_command_exits_well(capfd: pytest.CaptureFixture[str]) -> None:
    for command in ("capture", "import", "inspect", "policies", "replay"):
        assert run([command, "--help"]) == 0
        assert command in capfd.readouterr().out
    assert run(["--version"]) == 0
    assert capfd.readouterr().out.startswith("kvtool ")


@pytest.mark.parametrize("width", [80, 100, 120, 200])
def test_a_narrow_table_keeps_policy_and_error_whole(width: int) -> None:
    from rich.console import Console

    from kvtool.report.terminal import replay_table

    result = replay(TINY, ["all"], ratios=["0.5"], window=8)
    console = Console(width=width, record=True, file=io.StringIO())
    for part in replay_table(result, width):
        console.print(part)
    text = console.export_text()
    for cell in result.entries("cells"):
        if cell["sequence"] is None:
            (line,) = (ln for ln in text.splitlines() if f" {cell['policy']} " in ln and "│" in ln)
            assert f"{cell['mean_layer_error']:.4f}" in line
    assert ("Left out" in text) == (width < 120)
