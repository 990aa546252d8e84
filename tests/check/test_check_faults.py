"""Faults, caused while a baseline is written: a full disk, a kill, Ctrl-C, two at once."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvtool.check import check
from kvtool.check.baseline import read_baseline
from kvtool.cli.main import run
from kvtool.errors import KvtoolError
from kvtool.files import Lock

from .conftest import SAMPLES, Suite

KVTOOL = [sys.executable, "-c", "from kvtool.cli.main import main; main()"]


def stale(path: Path) -> bytes:
    """A whole baseline that an update would change."""
    check(path, update=True)
    file = path.parent / "check.json"
    raw = file.read_bytes().replace(b'"mean_output_error": 0.', b'"mean_output_error": 1.')
    file.write_bytes(raw)
    return raw


def test_a_full_disk_leaves_the_former_baseline_whole(suite: Suite) -> None:
    path = suite()
    raw = stale(path)
    words = [*KVTOOL, "check", str(path), "--update"]
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)); "
    words[2] = limit + "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); " + words[2]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 2
    assert "[disk-full]" in done.stderr
    assert (path.parent / "check.json").read_bytes() == raw
    assert sorted(p.name for p in path.parent.iterdir()) == ["check.json", "check.toml"]


WRITER = """
import copy, sys
from pathlib import Path
from kvtool.check.baseline import read_baseline, write_baseline
path = Path(sys.argv[1])
jobs = read_baseline(path)
print("ready", flush=True)
for number in range(100000):
    jobs["first"]["settings"]["window"] = number
    write_baseline(path, jobs)
"""


def test_killed_at_random_moments_there_is_a_whole_baseline(suite: Suite) -> None:
    path = suite()
    stale(path)
    file, chance = path.parent / "check.json", random.Random(0)
    before = read_baseline(file)
    for _ in range(8):
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(file)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(chance.uniform(0.001, 0.05))
        process.kill()
        process.communicate()
        found = read_baseline(file)
        assert found is not None
        assert before is not None
        assert found["first"]["cells"] == before["first"]["cells"]
    assert check(path, update=True).updated  # what a kill left beside it is in nobody's way


def test_interrupted_nothing_is_written(suite: Suite) -> None:
    path = suite(head=_smollm2(), defaults="", jobs='[[jobs]]\nname = "a"\ntrace = "big"\npolicies = ["all"]')
    process = subprocess.Popen(
        [*KVTOOL, "check", str(path), "--update"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    lock = path.parent / "check.json.lock"
    deadline = time.monotonic() + 60
    while not lock.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted" in error
    assert sorted(p.name for p in path.parent.iterdir()) == ["check.toml"]


def _smollm2() -> str:
    digests = dict(line.split() for line in (SAMPLES / "DIGESTS").read_text().splitlines())
    trace = f'path = "{SAMPLES / "smollm2.zarr"}"\ndigest = "{digests["smollm2"]}"\n'
    return 'baseline = "check.json"\n[traces.big]\n' + trace


def test_two_updates_at_once_are_refused(suite: Suite, capfd: pytest.CaptureFixture[str]) -> None:
    path = suite()
    lock = Lock(path.parent / "check.json")
    try:
        with pytest.raises(KvtoolError, match=f"pid {os.getpid()}"):
            check(path, update=True)
    finally:
        lock.release()
    check(path, update=True)
    lock = Lock(path.parent / "check.json")
    try:
        assert run(["check", str(path)]) == 0  # who only reads need not wait
    finally:
        lock.release()


def test_a_folder_that_cannot_be_written(suite: Suite, tmp_path: Path) -> None:
    path = suite()
    path.write_text(path.read_text().replace('"check.json"', '"no/such/check.json"'))
    with pytest.raises(KvtoolError) as caught:
        check(path, update=True)
    assert caught.value.code == "file-missing"
