"""Faults, caused: a killed replay, two at once, a full disk, flipped bits, a policy that changed in between."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvtool.errors import KvtoolError
from kvtool.files import Lock
from kvtool.manifest import canonical_json
from kvtool.replay import replay
from kvtool.result import Result

TINY = Path(__file__).resolve().parents[2] / "sample_traces" / "tiny-gqa.zarr"
KVTOOL = [sys.executable, "-c", "from kvtool.cli.main import main; main()"]
POLICIES = ["h2o", "jacap", "snapkv"]


def command(out: Path) -> list[str]:
    words = [*KVTOOL, "replay", str(TINY), "-r", "0.5,0.7,0.9", "-o", str(out), "--threads", "1"]
    for policy in POLICIES:
        words += ["-p", policy]
    return words


def test_a_killed_replay_is_unfinished_and_resumes_to_the_same_numbers(tmp_path: Path) -> None:
    expected = replay(TINY, POLICIES, ratios=["0.5", "0.7", "0.9"])
    out = tmp_path / "r"
    for parts in (1, 3):
        process = subprocess.Popen(command(out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            if out.is_dir() and len(list(out.glob("parts/0*"))) >= parts:
                break
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.wait()
        if not (out / "manifest.json").exists():
            with pytest.raises(KvtoolError, match="no finished result"):
                Result.load(out)
    if not (out / "manifest.json").exists():
        done = subprocess.run(command(out), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    result = Result.load(out)
    for table in ("cells", "layers", "rows", "ages"):
        assert canonical_json(result.entries(table)) == canonical_json(expected.entries(table))
    assert sorted(p.name for p in out.iterdir()) == sorted(
        ["manifest.json", *(f"{t}.parquet" for t in ("cells", "layers", "rows", "ages", "evict_steps"))]
    )


def test_a_second_replay_into_the_same_place_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "r"
    lock = Lock(out)
    try:
        with pytest.raises(KvtoolError, match=f"pid {os.getpid()}") as caught:
            replay(TINY, ["knorm"], ratios=["0.5"], layers=[0], output=out)
    finally:
        lock.release()
    assert caught.value.code == "locked"
    replay(TINY, ["knorm"], ratios=["0.5"], layers=[0], output=out)
    assert not (tmp_path / "r.lock").exists()


def test_a_full_disk_is_one_sentence_and_an_unfinished_result(tmp_path: Path) -> None:
    out = tmp_path / "r"
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000)); "
    ignore = "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    words = command(out)
    words[2] = limit + ignore + words[2]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: the disk is full")
    assert "[disk-full]" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert not (out / "manifest.json").exists()
    assert not list(out.rglob("*.tmp"))


@pytest.mark.parametrize("name", ["rows.parquet", "cells.parquet", "manifest.json"])
def test_a_flipped_bit_is_found_wherever_it_is(name: str, tmp_path: Path) -> None:
    out = tmp_path / "r"
    replay(TINY, ["knorm"], ratios=["0.5"], layers=[0], output=out)
    path = out / name
    raw = path.read_bytes()
    for place in range(0, len(raw) - 1, max(1, len(raw) // 40)):
        damaged = bytearray(raw)
        damaged[place] ^= 0x10
        path.write_bytes(bytes(damaged))
        with pytest.raises(KvtoolError) as caught:
            Result.load(out)
        assert caught.value.code == "result-damaged"
    path.write_bytes(raw)
    assert Result.load(out).tables["rows"].num_rows > 0


def test_parts_of_a_policy_whose_code_changed_are_not_reused(tmp_path: Path) -> None:
    source = (
        "from dataclasses import dataclass\n"
        "from kvtool.policies import Policy\n"
        "@dataclass(frozen=True)\n"
        "class Mine(Policy):\n"
        "    '''Mine.'''\n"
        "    def score(self, state, view):\n"
        "        return {}view.values.norm(dim=-1)\n"
    )
    file = tmp_path / "mine.py"

    class Stop(Exception):
        pass

    def stop(done: int, total: int, what: str) -> None:
        if done == 2:
            raise Stop

    file.write_text(source.format(""))
    with pytest.raises(Stop):
        replay(TINY, [f"{file}:Mine"], ratios=["0.5"], output=tmp_path / "r", progress=stop)
    file.write_text(source.format("-"))
    with pytest.raises(KvtoolError, match="with other options"):
        replay(TINY, [f"{file}:Mine"], ratios=["0.5"], output=tmp_path / "r")
    changed = replay(TINY, [f"{file}:Mine"], ratios=["0.5"], output=tmp_path / "r", force=True)
    fresh = replay(TINY, [f"{file}:Mine"], ratios=["0.5"])
    assert canonical_json(changed.entries("rows")) == canonical_json(fresh.entries("rows"))


@pytest.mark.parametrize("file", ["rows.parquet", "partials.npz", "part.json"])
@pytest.mark.parametrize("how", ["flipped", "truncated", "missing"])
def test_a_damaged_part_is_computed_again(file: str, how: str, tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def stop(done: int, total: int, what: str) -> None:
        if done == 2:
            raise Stop

    out = tmp_path / "r"
    with pytest.raises(Stop):
        replay(TINY, ["knorm"], ratios=["0.5"], output=out, progress=stop)
    path = sorted(out.glob("parts/0*"))[0] / file
    raw = bytearray(path.read_bytes())
    if how == "missing":
        path.unlink()
    else:
        raw[len(raw) // 2] ^= 1
        path.write_bytes(bytes(raw if how == "flipped" else raw[: len(raw) // 2]))
    again = replay(TINY, ["knorm"], ratios=["0.5"], output=out)
    fresh = replay(TINY, ["knorm"], ratios=["0.5"])
    assert canonical_json(again.entries("rows")) == canonical_json(fresh.entries("rows"))
    assert canonical_json(again.entries("cells")) == canonical_json(fresh.entries("cells"))


def test_ctrl_c_says_so_and_exits_130(tmp_path: Path) -> None:
    out = tmp_path / "r"
    process = subprocess.Popen(command(out), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline and not list(out.glob("parts/0*")):
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate()
    assert (process.returncode, stdout) == (130, "")
    assert stderr.startswith("error: interrupted")
