"""A real Dask cluster: the same bytes, killed workers, folders that workers do not see, an address where nobody is."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtool.errors import KvtoolError
from kvtool.replay import replay
from kvtool.replay.cluster import Cluster, expect_distributed

pytest.importorskip("distributed")

TINY = Path(__file__).resolve().parents[2] / "sample_traces" / "tiny-gqa.zarr"
KVTOOL = [sys.executable, "-c", "from kvtool.cli.main import main; main()"]
# What it does is written in the file `does` beside it: workers were started long before.
POLICY = '''
import os, signal, time
from dataclasses import dataclass
from pathlib import Path
from kvtool.policies import Policy

@dataclass(frozen=True)
class Mine(Policy):
    """Norms of the values."""
    def score(self, state, view):
        does = Path(__file__).with_name("does")
        word = does.read_text() if does.exists() else ""
        if word == "dies" and view.geometry.layer == 3:
            does.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        if word == "fails":
            raise ZeroDivisionError("no scores today")
        if word == "sleeps" and view.geometry.layer == 3:
            time.sleep(2)
        return view.values.norm(dim=-1)
'''


class Dask:
    """A scheduler and workers, each a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.file, self.folder = folder / "scheduler.json", folder
        self.processes: list[subprocess.Popen[bytes]] = []
        self._start("scheduler", "--port", "0", "--scheduler-file", str(self.file), "--no-dashboard", "--no-show")
        until = time.monotonic() + 120
        while not (self.file.exists() and self.file.read_text().endswith("}")):
            assert time.monotonic() < until
            time.sleep(0.05)
        self.address = json.loads(self.file.read_text())["address"]

    def _start(self, kind: str, *words: str) -> subprocess.Popen[bytes]:
        self.processes.append(
            subprocess.Popen(
                [sys.executable, "-m", f"distributed.cli.dask_{kind}", *words],
                cwd=self.folder,
                stdout=subprocess.DEVNULL,
                stderr=(self.folder / f"{kind}-{len(self.processes)}.log").open("wb"),
            )
        )
        return self.processes[-1]

    def workers(self, count: int) -> list[subprocess.Popen[bytes]]:
        words = ("--nthreads", "1", "--no-nanny", "--no-dashboard", "--local-directory", str(self.folder))
        started = [self._start("worker", self.address, *words) for _ in range(count)]
        from distributed import Client

        with Client(self.address, timeout=60, set_as_default=False) as client:
            client.wait_for_workers(count, timeout=120)
        return started

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()


@pytest.fixture
def dask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Dask]:
    """A scheduler without workers, and a working folder with a policy's file that its workers do not work in."""
    (tmp_path / "cluster").mkdir()
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "mine.py").write_text(POLICY)
    monkeypatch.chdir(tmp_path / "here")
    started = Dask(tmp_path / "cluster")
    try:
        yield started
    finally:
        started.stop()


def parquet(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.glob("*.parquet"))}


def test_a_cluster_gives_the_same_bytes_though_a_worker_is_killed(dask: Dask, tmp_path: Path) -> None:
    asked = {"policies": ["mine.py:Mine", "jacap"], "ratios": ["0.5", "0.9"]}
    replay(TINY, **asked, output="alone", workers=1)
    workers, notes = dask.workers(2), []
    Path("does").write_text("dies")
    told: list[tuple[int, int, str]] = []
    replay(TINY, **asked, output="r", cluster=dask.address, note=notes.append, progress=lambda *what: told.append(what))
    assert not Path("does").exists()
    assert sum(process.poll() is not None for process in workers) == 1
    assert parquet(Path("r")) == parquet(Path("alone"))
    assert f"the cluster at {dask.address} has 2 workers" in notes
    assert [done for done, _, _ in told] == list(range(7))
    assert sorted(file.name for file in Path("r").iterdir()) == sorted([*parquet(Path("alone")), "manifest.json"])

    # The same cluster, one worker left: errors of a policy, and a run that goes on where it was.
    Path("does").write_text("fails")
    with pytest.raises(KvtoolError) as caught:
        replay(TINY, **asked, output="failing", cluster=dask.address)
    assert caught.value.code == "policy-broken"
    assert "ZeroDivisionError: no scores today" in caught.value.message
    Path("does").write_text("sleeps")
    words = ["-p", "mine.py:Mine", "-r", "0.5", "--cluster", dask.address, "-o", "stopped"]
    process = subprocess.Popen([*KVTOOL, "replay", str(TINY), *words], stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 120
    while not list(Path("stopped").glob("parts/0*")):
        assert time.monotonic() < until
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "error: interrupted" in stderr
    assert "Traceback" not in stderr
    time.sleep(3)  # the unit that was being done ends, and no other is begun
    assert 1 <= len(list(Path("stopped").glob("parts/0*"))) < 6
    Path("does").unlink()
    replay(TINY, ["mine.py:Mine"], ratios=["0.5"], output="stopped", cluster=dask.address)
    replay(TINY, ["mine.py:Mine"], ratios=["0.5"], output="fresh", workers=1)
    assert parquet(Path("stopped")) == parquet(Path("fresh"))


def test_what_a_worker_does_not_see_is_one_sentence(
    dask: Dask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvtool.replay import cluster

    dask.workers(1)
    look = cluster._looking
    for key, value, said in [
        ("probe", "another folder", "does not see the folder"),
        ("trace", "COMMIT.json is missing", "does not find this trace at"),
        ("torch", "2.0.0", "has torch 2.0.0, this process"),
        ("kvtool", None, "has kvtool (not installed), this process"),
    ]:
        monkeypatch.setattr(cluster, "_looking", lambda *given, k=key, v=value: lambda: {**look(*given)(), k: v})
        with pytest.raises(KvtoolError, match=said.replace("(", r"\(").replace(")", r"\)")) as caught:
            replay(TINY, ["knorm"], ratios=["0.5"], output="r", cluster=dask.address)
        assert caught.value.code == "worker-differs"
    monkeypatch.setattr(cluster, "_looking", look)
    # A trace that only this process sees under that path.
    shutil.copytree(TINY, "gone.zarr")
    from kvtool.trace import open_trace

    opened = open_trace("gone.zarr")
    shutil.rmtree("gone.zarr")
    with pytest.raises(KvtoolError) as caught:
        Cluster(_order_of(opened), dask.address, _store(opened), print)._check(_client(dask.address))
    assert caught.value.code == "worker-differs"
    assert "does not find this trace" in caught.value.message


def _order_of(trace: object) -> object:
    from kvtool.replay.order import Order

    return Order(str(Path("gone.zarr").absolute()), trace.digest, {}, (), {}, str(Path("x").absolute()), "0")  # type: ignore[attr-defined]


def _store(trace: object) -> object:
    from kvtool.replay.parts import Store

    store = Store.of_worker(Path("x").absolute(), "0")
    store.announce()
    return store


def _client(address: str) -> object:
    from distributed import Client

    return Client(address, timeout=30, set_as_default=False)


def test_an_address_where_nobody_is_fails_within_seconds(tmp_path: Path) -> None:
    begun = time.monotonic()
    done = subprocess.run(
        [*KVTOOL, "replay", str(TINY), "-p", "knorm", "--cluster", "tcp://127.0.0.1:9", "-o", str(tmp_path / "r")],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if not line.startswith(("note:", "hint:"))]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("error: there is no Dask scheduler at tcp://127.0.0.1:9")
    assert lines[0].endswith("[cluster]")
    assert time.monotonic() - begun < 60  # 8 s of them for the address; the rest starts Python on a busy machine
    assert not (tmp_path / "r").exists() or not list((tmp_path / "r").rglob("probe-*"))


def test_a_missing_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("kvtool.replay.cluster.find_spec", lambda name: None)
    with pytest.raises(KvtoolError, match="needs the package distributed") as caught:
        replay(TINY, ["knorm"], cluster="tcp://127.0.0.1:9", output=tmp_path / "r")
    assert caught.value.code == "package-missing"
    with contextlib.suppress(KvtoolError):
        expect_distributed()
    assert not (tmp_path / "r").exists()
