"""Whatever stops a writer, its place holds a whole trace or none, and everything says so."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvtool.errors import KvtoolError
from kvtool.layer import Geometry
from kvtool.trace import Trace, TraceWriter, open_trace
from kvtool.trace.publish import WRITING, Publication, siblings
from kvtool.trace.verify import verify_bytes

WRITER = textwrap.dedent(
    """
    import sys, torch
    from kvtool.layer import Geometry
    from kvtool.trace import TraceWriter
    from kvtool.trace.publish import Publication
    torch.set_num_threads(1)
    path, mark, rounds = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
    print("ready", flush=True)
    for number in range(rounds):
        with TraceWriter(path, model={}, tokenizer=None, capture={}, dtype=torch.float32, force=True,
                         planned=3) as writer:
            for index in range(3):
                sequence = writer.sequence({0: Geometry(0, 2, 1, 8, 8, 1.0)}, prompt_length=4)
                block = torch.full((1, 1500, 8), mark)
                queries = torch.full((2, 1500, 8), mark)
                sequence.append(0, keys=block, values=block, queries=queries, query_steps=torch.arange(1500))
                sequence.finish(tokens=torch.zeros(1500), positions=torch.arange(1500))
                if len(sys.argv) > 4:
                    print("finished", index, flush=True)
                    sys.stdin.readline()
        print("published", flush=True)
    """
)


def start(path: Path, mark: float, rounds: int = 1, *, stepwise: bool = False) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(path), str(mark), str(rounds), *(["step"] if stepwise else [])]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def small(path: Path, mark: float = 1.0, *, force: bool = False) -> None:
    with TraceWriter(path, model={}, tokenizer=None, capture={}, dtype=torch.float32, force=force) as writer:
        sequence = writer.sequence({0: Geometry(0, 2, 1, 8, 8, 1.0)}, prompt_length=4)
        block = torch.full((1, 6, 8), mark)
        sequence.append(0, keys=block, values=block, queries=block.expand(2, 6, 8), query_steps=torch.arange(6))
        sequence.finish(tokens=torch.zeros(6), positions=torch.arange(6))


def mark_of(path: Path) -> float:
    keys = open_trace(path).sequences[-1].layer(0).keys
    assert float(keys.min()) == float(keys.max())
    return float(keys[0, 0, 0])


def test_killed_at_random_moments_there_is_a_whole_trace_or_none(tmp_path: Path) -> None:
    path, chance, outcomes = tmp_path / "run.zarr", random.Random(0), []
    for _ in range(6):
        process = start(path, 5.0)
        time.sleep(chance.uniform(0.0, 0.35))
        kill(process)
        if path.exists():
            assert verify_bytes(path).damage == []
            assert mark_of(path) == 5.0
            assert len(open_trace(path).sequences) == 3
            outcomes.append("whole")
            for child in (path, *siblings(path, "replaced")):
                child.rename(tmp_path / f"done{len(outcomes)}{child.suffix}")
        else:
            with pytest.raises(KvtoolError) as caught:
                open_trace(path)
            assert caught.value.code in ("trace-incomplete", "file-missing")
            outcomes.append("none")
    small(path)
    assert mark_of(path) == 1.0
    assert [p.name for p in tmp_path.iterdir() if not p.name.startswith("done")] == ["run.zarr"]


def test_killed_while_replacing_the_older_or_the_newer_trace_is_whole(tmp_path: Path) -> None:
    path, chance = tmp_path / "run.zarr", random.Random(1)
    small(path, 1.0)
    for number in range(4):
        process = start(path, float(number + 2), rounds=50)
        time.sleep(chance.uniform(0.05, 0.4))
        kill(process)
        if not path.exists():  # between the two renames: the older one lies beside
            with pytest.raises(KvtoolError) as caught:
                open_trace(path)
            assert caught.value.code == "trace-incomplete"
            Publication(path, force=True).abandon()
        assert verify_bytes(path).damage == []
        assert mark_of(path) in (1.0, *(float(n + 2) for n in range(number + 1)))


def test_incomplete_trace_says_how_many_sequences_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "run.zarr"
    process = start(path, 5.0, stepwise=True)
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stdout.readline() == "finished 0\n"
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "finished 1\n"
    kill(process)
    (partial,) = siblings(path, "partial")
    assert partial.name == f"run.zarr.partial-{process.pid}"
    for place in (path, partial):
        for check in (open_trace, verify_bytes):
            with pytest.raises(KvtoolError, match="is incomplete, 2 of 3 sequences whole") as caught:
                check(place)
            assert caught.value.code == "trace-incomplete"
    small(path)  # the next writer removes what the dead one left
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run.zarr"]
    assert mark_of(path) == 1.0


def test_a_second_writer_is_refused_at_once_and_a_third_may_follow(tmp_path: Path) -> None:
    path = tmp_path / "run.zarr"
    process = start(path, 5.0, stepwise=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "finished 0\n"
    with pytest.raises(KvtoolError, match=rf"another process \(pid {process.pid}\)") as caught:
        small(path)
    assert caught.value.code == "locked"
    assert siblings(path, "partial")  # the first writer's work is untouched
    out, _ = process.communicate("\n\n\n")
    assert out.endswith("published\n")
    assert mark_of(path) == 5.0
    small(path, 6.0, force=True)
    assert mark_of(path) == 6.0


def test_a_second_writer_in_the_same_process_is_refused(tmp_path: Path) -> None:
    first = Publication(tmp_path / "run.zarr", force=False)
    with pytest.raises(KvtoolError, match="another process"):
        Publication(tmp_path / "run.zarr", force=False)
    first.abandon()
    assert list(tmp_path.iterdir()) == []


def test_existing_traces_need_force(tmp_path: Path) -> None:
    path = tmp_path / "run.zarr"
    small(path, 1.0)
    with pytest.raises(KvtoolError, match="already there") as caught:
        small(path, 2.0)
    assert caught.value.code == "output-exists"
    assert mark_of(path) == 1.0
    small(path, 2.0, force=True)
    assert mark_of(path) == 2.0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run.zarr"]


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_force_replaces_traces_and_nothing_else(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "thesis"
    if kind == "file":
        path.write_text("years of work")
    elif kind == "folder":
        path.mkdir()
        (path / "chapter1").write_text("years of work")
    else:
        small(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    before = sorted(p.name for p in tmp_path.rglob("*"))
    with pytest.raises(KvtoolError, match="is no trace") as caught:
        small(path, force=True)
    assert caught.value.code == "output-exists"
    assert sorted(p.name for p in tmp_path.rglob("*")) == before


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, SystemExit])
def test_an_exception_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    def broken() -> None:
        with TraceWriter(tmp_path / "t", model={}, tokenizer=None, capture={}, dtype=torch.float32) as writer:
            writer.sequence({0: Geometry(0, 1, 1, 2, 2, 1.0)}, prompt_length=0)
            raise error

    with pytest.raises(error):
        broken()
    assert list(tmp_path.iterdir()) == []


def test_interrupting_a_process_leaves_nothing(tmp_path: Path) -> None:
    process = start(tmp_path / "run.zarr", 5.0, stepwise=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "finished 0\n"
    process.send_signal(signal.SIGINT)
    process.communicate()
    assert process.returncode != 0
    assert list(tmp_path.iterdir()) == []


def test_an_unfinished_sequence_is_not_published(tmp_path: Path) -> None:
    def forgetful() -> None:
        with TraceWriter(tmp_path / "t", model={}, tokenizer=None, capture={}, dtype=torch.float32) as writer:
            writer.sequence({0: Geometry(0, 1, 1, 2, 2, 1.0)}, prompt_length=0)

    with pytest.raises(KvtoolError, match="must be finished"):
        forgetful()
    assert list(tmp_path.iterdir()) == []


LIMITED = textwrap.dedent(
    """
    import resource, sys, torch
    from kvtool.errors import KvtoolError
    from kvtool.layer import Geometry
    from kvtool.trace import TraceWriter
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), int(sys.argv[2])))
    try:
        with TraceWriter(sys.argv[1], model={}, tokenizer=None, capture={}, dtype=torch.float32) as writer:
            sequence = writer.sequence({0: Geometry(0, 1, 1, 64, 64, 1.0)}, prompt_length=1)
            for _ in range(int(sys.argv[3])):
                block = torch.ones(1, 1000, 64)
                sequence.append(0, keys=block, values=block)
            queries = torch.ones(1, 1, 64)
            sequence.append(0, queries=queries, query_steps=torch.zeros(1))
            count = 1000 * int(sys.argv[3])
            sequence.finish(tokens=torch.zeros(count), positions=torch.arange(count))
    except KvtoolError as error:
        print(error.code, "|", error.message)
    """
)


@pytest.mark.parametrize(
    ("limit", "blocks"),
    [(300_000, 4), (256_001, 1), (20, 1), (3000, 1)],
    ids=["spool", "chunk", "first file", "metadata"],
)
def test_no_room_for_a_file_is_one_clear_error(tmp_path: Path, limit: int, blocks: int) -> None:
    command = [sys.executable, "-c", LIMITED, str(tmp_path / "run.zarr"), str(limit), str(blocks)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("disk-full | the disk is full (or a quota or file size limit is reached)"), (
        done.stderr
    )
    assert done.stdout.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("when", ["fsync", "rename", "write"])
def test_a_full_disk_at_any_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, when: str) -> None:
    calls = {"left": 12 if when == "fsync" else 2}
    target = {"fsync": (os, "fsync"), "rename": (Path, "rename"), "write": (Path, "open")}[when]
    sound = getattr(*target)

    def failing(*args: object, **options: object) -> object:
        calls["left"] -= 1
        if calls["left"] < 0:
            raise OSError(number, os.strerror(number))
        return sound(*args, **options)

    monkeypatch.setattr(*target, failing)
    with pytest.raises(KvtoolError) as caught:
        small(tmp_path / "run.zarr")
    monkeypatch.undo()
    assert caught.value.code == "disk-full"
    assert os.strerror(number) in caught.value.message
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_may_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*args: object, **options: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", denied)
    with pytest.raises(KvtoolError, match=r"cannot write .*: Permission denied") as caught:
        small(tmp_path / "run.zarr")
    assert caught.value.code == "write-failed"


def test_a_refused_check_publishes_nothing_and_keeps_the_older_trace(tmp_path: Path) -> None:
    path = tmp_path / "run.zarr"
    small(path, 1.0)
    seen: list[int] = []

    def check(trace: Trace) -> None:
        seen.append(int(trace.sequences[0].layer(0).keys.sum()))
        raise KvtoolError("trace-inaccurate", "no")

    def write() -> None:
        options = {"dtype": torch.float32, "force": True, "check": check}
        with TraceWriter(path, model={}, tokenizer=None, capture={}, **options) as writer:
            sequence = writer.sequence({0: Geometry(0, 1, 1, 2, 2, 1.0)}, prompt_length=1)
            ones = torch.ones(1, 3, 2)
            sequence.append(0, keys=ones, values=ones, queries=ones, query_steps=torch.arange(3))
            sequence.finish(tokens=torch.zeros(3), positions=torch.arange(3))

    with pytest.raises(KvtoolError, match="no"):
        write()
    assert seen == [6]
    assert mark_of(path) == 1.0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run.zarr"]


def test_a_missing_parent_is_named(tmp_path: Path) -> None:
    with pytest.raises(KvtoolError, match="does not exist") as caught:
        small(tmp_path / "nowhere" / "run.zarr")
    assert caught.value.code == "file-missing"


def test_killed_between_the_renames_the_older_trace_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "run.zarr"
    small(path, 1.0)
    small(tmp_path / "new", 2.0)
    path.rename(tmp_path / "run.zarr.replaced-77")
    (tmp_path / "new").rename(tmp_path / "run.zarr.partial-77")
    with pytest.raises(KvtoolError, match="is incomplete") as caught:
        open_trace(path)
    assert caught.value.code == "trace-incomplete"
    with pytest.raises(KvtoolError, match="already there"):
        small(path, 3.0)
    assert mark_of(path) == 1.0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run.zarr"]


def test_what_is_no_trace_is_said(tmp_path: Path, make_trace: Callable[..., Path]) -> None:
    cases = {"missing": "file-missing", "text": "trace-not", "empty": "trace-not", "zarr": "trace-incomplete"}
    (tmp_path / "text").write_text("hello")
    (tmp_path / "empty").mkdir()
    path = make_trace()
    (path / "COMMIT.json").unlink()
    path.rename(tmp_path / "zarr")
    for name, code in cases.items():
        with pytest.raises(KvtoolError) as caught:
            open_trace(tmp_path / name)
        assert caught.value.code == code


def test_nothing_of_the_writer_remains_in_the_trace(tmp_path: Path) -> None:
    small(tmp_path / "run.zarr")
    assert not (tmp_path / "run.zarr" / WRITING).exists()
    assert verify_bytes(tmp_path / "run.zarr").damage == []
