"""Workers: the very bytes of one process, whoever dies on the way, and nobody left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtool.errors import KvtoolError
from kvtool.replay import replay
from kvtool.result import Result

TINY = Path(__file__).resolve().parents[2] / "sample_traces" / "tiny-gqa.zarr"
KVTOOL = [sys.executable, "-c", "from kvtool.cli.main import main; main()"]

# A policy that leaves its process's id, and does what the environment says.
POLICY = '''
import os, signal, time
from dataclasses import dataclass
from pathlib import Path
from kvtool.policies import Policy

@dataclass(frozen=True)
class Mine(Policy):
    """Norms of the values."""
    def score(self, state, view):
        here = Path(__file__).parent
        (here / "pids").mkdir(exist_ok=True)
        (here / "pids" / str(os.getpid())).touch()
        print("said by a policy")
        layer = view.geometry.layer
        if os.environ.get("DIES") == f"once at {layer}" and not (here / "died").exists():
            (here / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if os.environ.get("DIES") == f"always at {layer}":
            os.kill(os.getpid(), signal.SIGKILL)
        if os.environ.get("FAILS") and layer >= int(os.environ["FAILS"]):
            time.sleep(0.5 if layer == int(os.environ["FAILS"]) else 0)
            raise ZeroDivisionError("no scores today")
        time.sleep(float(os.environ.get("SLEEPS", 0)) if layer else 0)
        return view.values.norm(dim=-1)
'''

METRIC = '''
from dataclasses import dataclass
import torch
from kvtool.metrics import Column, Metric

@dataclass(frozen=True)
class Kept(Metric):
    """Rows kept."""
    name = "untouched"
    columns = (Column("untouched_share", "layer", "share", "higher", "Rows that are never evicted."),)
    def partial(self, errors, geometry, retained):
        never = retained.evict_step == retained.evict_step.shape[1]
        return {"untouched_share": never.to(torch.float64).mean()}
'''


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a policy's file."""
    (tmp_path / "mine.py").write_text(POLICY)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def without_run(result: Result) -> str:
    """The JSON document but for what says where and when it ran."""
    document = result.document()
    document["manifest"]["environment"].pop("argv")
    return json.dumps(document)


def command(out: Path, *words: str) -> list[str]:
    asked = ["-p", "mine.py:Mine", "-p", "knorm", "-r", "0.5,0.9", "--workers", "2", "-o", str(out)]
    return [*KVTOOL, "replay", str(TINY), *asked, *words]


def parquet(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.glob("*.parquet"))}


def until(true: Callable[[], Any], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def workers_of(place: Path) -> list[int]:
    return [int(file.name) for file in (place / "pids").glob("*")] if (place / "pids").is_dir() else []


def test_workers_change_no_byte(place: Path) -> None:
    (place / "kept.py").write_text(METRIC)
    asked: dict[str, Any] = {"budgets": [40, 50], "kl_windows": [8], "schedules": ["every:16"]}
    asked["metrics"] = ["kept.py:Kept"]
    policies = ["mine.py:Mine", "jacap", "random:seed=3"]
    alone = replay(TINY, policies, **asked, workers=1, output=place / "one")
    two = replay(TINY, policies, **asked, workers=2, output=place / "two")
    here = replay(TINY, policies, **asked, output=place / "here")
    loose = replay(TINY, policies, **asked, workers=1)
    assert parquet(place / "one") == parquet(place / "two") == parquet(place / "here")
    assert len(parquet(place / "one")) >= 5
    assert without_run(alone) == without_run(two) == without_run(here) == without_run(loose)
    assert sorted(file.name for file in place.iterdir()) == ["here", "kept.py", "mine.py", "one", "pids", "two"]
    assert len(workers_of(place)) >= 3  # this process too


def test_what_a_policy_prints_is_no_answer(place: Path) -> None:
    done = subprocess.run(
        [*KVTOOL, "replay", str(TINY), "-p", "mine.py:Mine", "-b", "40", "--workers", "2", "--json"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["schema"] == "kvtool.replay/1"
    assert "said by a policy" in done.stderr


def test_a_killed_worker_is_replaced_and_nothing_is_lost(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = replay(TINY, ["mine.py:Mine", "knorm"], ratios=["0.5", "0.9"], output=place / "expected")
    monkeypatch.setenv("DIES", "once at 3")
    done = subprocess.run(command(place / "r"), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (place / "died").exists()
    assert done.stderr.count("was killed by SIGKILL at sequence") == 1
    assert parquet(place / "r") == parquet(place / "expected")
    assert without_run(Result.load(place / "r")) == without_run(expected)
    assert not (place / "r" / "parts").exists()


def test_a_layer_that_kills_every_worker_is_named_and_the_rest_stays(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIES", "always at 3")
    done = subprocess.run(command(place / "r"), capture_output=True, text=True)
    assert done.returncode == 2
    assert "[worker-lost]" in done.stderr
    assert "sequence 0 layer 3: the worker that computed it died 3 times" in done.stderr
    assert "Traceback" not in done.stderr
    assert list((place / "r").glob("parts/0000-000*"))
    assert not list((place / "r").glob("parts/.*"))
    assert not (place / "r.lock").exists()
    monkeypatch.delenv("DIES")
    again = replay(TINY, ["mine.py:Mine", "knorm"], ratios=["0.5", "0.9"], output=place / "r")  # without workers too
    fresh = replay(TINY, ["mine.py:Mine", "knorm"], ratios=["0.5", "0.9"])
    assert without_run(again) == without_run(fresh)


@pytest.mark.parametrize("workers", [None, 1, 2])
def test_the_error_of_a_policy_is_the_same_with_any_number_of_workers(
    workers: int | None, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAILS", "3")
    with pytest.raises(KvtoolError) as caught:
        replay(TINY, ["mine.py:Mine"], ratios=["0.5"], workers=workers, output=place / "r", sequences=[1])
    assert caught.value.code == "policy-broken"
    assert caught.value.message == "mine.py:Mine failed at layer 3: ZeroDivisionError: no scores today"
    assert not (place / "r").exists()


def test_ctrl_c_stops_every_worker_and_keeps_what_is_finished(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLEEPS", "600")
    process = subprocess.Popen(
        command(place / "r"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    until(lambda: list((place / "r").glob("parts/0*")) and len(workers_of(place)) >= 2)
    pids = [pid for pid in workers_of(place) if pid != process.pid]
    assert any(alive(pid) for pid in pids)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout) == (130, "")
    assert "error: interrupted" in stderr
    assert "Traceback" not in stderr
    assert [pid for pid in pids if alive(pid)] == []
    assert list((place / "r").glob("parts/0*"))
    assert not list((place / "r").glob("parts/.*"))
    monkeypatch.setenv("SLEEPS", "0")
    done = subprocess.run(command(place / "r"), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_no_worker_outlives_a_killed_parent(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLEEPS", "600")
    process = subprocess.Popen(command(place / "r"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until(lambda: len(workers_of(place)) >= 2)
    pids = [pid for pid in workers_of(place) if pid != process.pid]
    process.kill()
    process.wait()
    until(lambda: not any(alive(pid) for pid in pids), 20)
    assert pids


def test_a_second_run_into_the_same_folder_is_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLEEPS", "600")
    process = subprocess.Popen(command(place / "r"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until(lambda: workers_of(place))
        with pytest.raises(KvtoolError, match=f"pid {process.pid}") as caught:
            replay(TINY, ["knorm"], ratios=["0.5"], workers=2, output=place / "r")
        assert caught.value.code == "locked"
    finally:
        process.terminate()
        process.wait()


def test_a_file_that_changes_under_a_worker_is_found(place: Path) -> None:
    def edit(done: int, total: int, what: str) -> None:  # told before the first worker starts
        (place / "mine.py").write_text(POLICY + "# edited\n")

    with pytest.raises(KvtoolError) as caught:
        replay(TINY, ["mine.py:Mine"], ratios=["0.5"], workers=1, progress=edit, output=place / "r")
    assert caught.value.code == "worker-differs"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--workers", "0"], "--workers 0 is below 1"),
        (["--workers", "2", "--cluster", "tcp://127.0.0.1:1"], "--workers and --cluster were both given"),
        (["--workers", "2", "--threads", "4"], "a worker has one thread"),
        (["--cluster", "tcp://127.0.0.1:1"], "--cluster needs -o"),
    ],
)
def test_contradictions_are_one_sentence(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    from kvtool.cli.main import run

    assert run(["replay", str(TINY), "-p", "knorm", *words]) == 2
    found = capsys.readouterr()
    assert said in found.err
    assert found.out == ""
