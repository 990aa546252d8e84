"""Remote traces, from servers that work and servers that lie: nothing is read that is not what was written."""

from __future__ import annotations

import functools
import http.server
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtool.cli.main import run
from kvtool.errors import KvtoolError
from kvtool.manifest import canonical_json
from kvtool.replay import replay
from kvtool.trace import open_trace, remote

TINY = Path(__file__).resolve().parents[2] / "sample_traces" / "tiny-gqa.zarr"
fsspec = pytest.importorskip("fsspec")


class Server:
    """Serves a folder over HTTP on this machine, and does with some files what it is told.

    Attributes:
        asked: paths, one entry per GET.
        wrong: end of a path -> what happens: `short`, `other`, `long`, `missing` or `gone`.
    """

    def __init__(self, folder: Path) -> None:
        self.asked: list[str] = []
        self.wrong: dict[str, str] = {}
        outer = self

        class Handler(http.server.SimpleHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.asked.append(self.path)
                how = next((how for end, how in outer.wrong.items() if self.path.endswith(end)), None)
                file = Path(self.translate_path(self.path))
                if how is None or (how == "gone" and not file.exists()):
                    super().do_GET()
                elif how == "missing":
                    self.send_error(404)
                elif how == "gone":  # in the middle of the file
                    raw = file.read_bytes()
                    self.send_response(200)
                    self.send_header("Content-Length", str(len(raw)))
                    self.end_headers()
                    self.wfile.write(raw[: len(raw) // 2])
                    self.wfile.flush()
                    self.connection.close()
                else:
                    raw = file.read_bytes()
                    bad = {"short": raw[:-3], "long": raw + b"xyz", "other": raw[:-1] + bytes([raw[-1] ^ 1])}[how]
                    self.send_response(200)
                    self.send_header("Content-Length", str(len(bad)))
                    self.end_headers()
                    self.wfile.write(bad)

            def do_HEAD(self) -> None:
                if any(self.path.endswith(end) for end in outer.wrong):
                    self.send_error(405)
                else:
                    super().do_HEAD()

            def log_message(self, *words: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(
            ("127.0.0.1", 0), functools.partial(Handler, directory=str(folder))
        )
        self._server.handle_error = lambda *given: None  # type: ignore[method-assign]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}/{TINY.name}"

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    pytest.importorskip("aiohttp")
    started = Server(TINY.parent)
    try:
        yield started
    finally:
        started.stop()


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtool.trace.remote.time.sleep", lambda seconds: None)


def rows_of(trace: Any, **more: Any) -> str:
    result = replay(trace, ["jacap", "snapkv"], ratios=["0.5"], **more)
    return canonical_json([result.entries(name) for name in ("cells", "layers", "rows", "ages")])


def test_http_gives_the_same_numbers_and_fetches_what_it_needs(server: Server) -> None:
    expected = rows_of(TINY, layers=[3], sequences=[1])
    server.asked.clear()
    assert rows_of(server.address, layers=[3], sequences=[1], online=True) == expected
    chunks = [path for path in server.asked if "/c/" in path]
    assert chunks
    assert not [path for path in chunks if "layers/05" in path and path.endswith(("queries", "keys", "values"))]
    assert all("/layers/05/keys" not in path and "/layers/05/values" not in path for path in chunks)
    whole = [path for path in chunks if "/layers/03/keys/" in path]
    assert len(whole) == len(set(whole))  # each once


def test_workers_read_a_remote_trace_too(server: Server) -> None:
    assert rows_of(server.address, layers=[3, 5], workers=2, online=True) == rows_of(TINY, layers=[3, 5])


@pytest.mark.parametrize("protocol", ["file", "memory"])
def test_other_filesystems_work_as_well(protocol: str) -> None:
    if protocol == "memory":
        memory = fsspec.filesystem("memory")
        for file in TINY.rglob("*"):
            if file.is_file():
                memory.pipe(f"/remote/{file.relative_to(TINY).as_posix()}", file.read_bytes())
        address = "memory://remote"
    else:
        address = f"file://{TINY}"
    trace = open_trace(address, online=True)
    assert trace.digest == open_trace(TINY).digest
    assert trace.shown == address
    assert rows_of(address, layers=[0], online=True) == rows_of(TINY, layers=[0])


def test_nothing_is_fetched_unasked(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (
        ["replay", server.address, "-p", "knorm"],
        ["inspect", server.address],
        ["inspect", server.address, "--verify"],
        ["ablate", server.address],
        ["diff", "--traces", server.address, str(TINY)],
    ):
        assert run(words) == 2
        said = capsys.readouterr().err
        assert said.startswith(
            f"error: {server.address} is an address, and nothing is fetched without --online [usage]"
        )
    assert server.asked == []


def test_inspect_and_diff_take_addresses(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", server.address, "--online", "--verify"]) == 0
    assert "bytes: all" in capsys.readouterr().out
    assert run(["diff", "--traces", server.address, str(TINY), "--online"]) == 0


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("short", "trace-damaged"),
        ("long", "trace-damaged"),
        ("other", "trace-damaged"),
        ("missing", "trace-damaged"),
        ("gone", "file-missing"),
    ],
)
@pytest.mark.parametrize("file", ["layers/03/keys/c/0/0/0", "layers/03/keys/zarr.json"])
def test_a_server_that_lies_is_found_out(how: str, code: str, file: str, server: Server, quickly: None) -> None:
    server.wrong[file] = how
    with pytest.raises(KvtoolError) as caught:
        rows_of(server.address, layers=[3], online=True)
    assert caught.value.code == code
    assert file in caught.value.message
    assert server.address in caught.value.message
    assert "kvtool-scratch" not in caught.value.message


@pytest.mark.parametrize(
    ("how", "code"), [("short", "trace-damaged"), ("other", "trace-damaged"), ("missing", "file-missing")]
)
def test_a_wrong_commit_file_is_found_out(how: str, code: str, server: Server, quickly: None) -> None:
    server.wrong["COMMIT.json"] = how
    with pytest.raises(KvtoolError) as caught:
        open_trace(server.address, online=True)
    assert caught.value.code == code
    assert server.address in caught.value.message


def test_verify_names_every_damaged_file(server: Server, quickly: None, capsys: pytest.CaptureFixture[str]) -> None:
    server.wrong = {"layers/03/keys/c/0/0/0": "other", "layers/00/values/c/0/0/0": "short"}
    assert run(["inspect", server.address, "--online", "--verify"]) == 2
    found = capsys.readouterr()
    assert "[trace-damaged]" in found.err
    assert found.out.count("layers/03/keys/c/0/0/0") == 2  # of both sequences
    assert found.out.count("layers/00/values/c/0/0/0") == 2


def test_nobody_there_and_no_such_protocol(quickly: None) -> None:
    pytest.importorskip("aiohttp")
    with pytest.raises(KvtoolError, match="cannot be fetched") as caught:
        open_trace("http://127.0.0.1:9/run.zarr", online=True)
    assert caught.value.code == "file-missing"
    with pytest.raises(KvtoolError, match="nosuch://") as caught:
        open_trace("nosuch://a/run.zarr", online=True)
    assert caught.value.code == "usage"


def test_disk_space_stays_constant_and_the_folder_goes(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "KEPT_BYTES", 100_000)
    trace = open_trace(server.address, online=True)
    assert trace.mirror is not None
    root, sizes = trace.mirror.root, []
    metadata = sum(file.stat().st_size for file in root.rglob("*") if file.is_file())
    for sequence in trace.sequences:
        for layer_id in sequence.layer_ids:
            layer = sequence.layer(layer_id)
            assert layer.queries.shape[0] >= layer.keys.shape[0]
            sizes.append(sum(file.stat().st_size for file in root.rglob("*") if file.is_file()) - metadata)
    assert max(sizes) <= 100_000 + max(info.chunk_bytes * info.shape[0] for info in trace.tree.arrays.values())
    assert sum(open_trace(TINY).tree.arrays[path].chunk_bytes for path in trace.tree.arrays) > 0
    del trace, sequence, layer
    import gc

    gc.collect()
    assert not root.exists()


def test_a_broken_address_leaves_no_folder(
    server: Server, quickly: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    server.wrong["COMMIT.json"] = "missing"
    with pytest.raises(KvtoolError):
        open_trace(server.address, online=True)
    import gc

    gc.collect()
    assert list(tmp_path.iterdir()) == []
    shutil.rmtree(tmp_path)
