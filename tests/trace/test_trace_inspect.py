"""`kvtool inspect` on sound, damaged, incomplete and wrong traces."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtool.cli.main import run


def test_tables(make_trace: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    path = make_trace()
    assert run(["inspect", str(path)]) == 0
    out, err = capsys.readouterr()
    for word in ("toy", "s0", "s1", "sliding 9, sink logits, KV of layer 3", "softcap 20", "snapkv", "95 files"):
        assert word in out
    assert "bytes: all" not in out
    assert err.splitlines()[-1] == f"next: kvtool inspect {path} --verify"


@pytest.mark.parametrize("archive", [False, True])
def test_verify(make_trace: Callable[..., Path], capsys: pytest.CaptureFixture[str], archive: bool) -> None:
    path = make_trace(archive=archive)
    assert run(["inspect", str(path), "--verify"]) == 0
    out, err = capsys.readouterr()
    assert "bytes: all 95 files are as written" in out
    assert out.count("good") == 4
    assert "1e-05" in out  # the bound that was used
    assert err.splitlines()[-1] == f"next: kvtool replay {path} -p snapkv -r 0.5"


def test_json(make_trace: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    path = make_trace()
    assert run(["inspect", str(path), "--verify", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "kvtool.inspect/1"
    assert document["layer_ids"] == [3, 11]
    assert document["stored_dtype"] == "float32"
    assert document["manifest"]["tokenizer"] == {"digest": "ab"}
    assert document["bytes"] == sum(
        p.stat().st_size for p in path.rglob("*") if p.name != "COMMIT.json" and p.is_file()
    )
    assert [row["tokens"] for row in document["sequences"]] == [40, 23]
    first = document["sequences"][0]["layers"]
    assert [row["output_projection"] for row in first] == [True, False]
    assert [row["kv_source"] for row in first] == [None, 3]
    assert document["verify"]["damage"] == []
    assert document["verify"]["run_dtype"] == "float32"
    assert [row["ok"] for row in document["verify"]["recompute"]] == [True] * 4
    assert {row["bound"] for row in document["verify"]["recompute"]} == {1e-5}
    kinds = {row["name"]: (row["kind"], row["ok"], row["reason"]) for row in document["serving"]}
    assert kinds["snapkv"] == ("policy", True, None)
    assert kinds["layer_error"][1] is False  # layer 11 has no output projection


def test_every_damaged_file_is_named(make_trace: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    path = make_trace()
    gone = "sequences/0000/layers/03/keys/c/1/0/0"
    (path / gone).unlink()
    (path / "stray [x]").write_text("")
    raw = bytearray((path / "zarr.json").read_bytes())
    raw[40] ^= 1
    (path / "zarr.json").write_bytes(raw)
    assert run(["inspect", str(path), "--verify"]) == 2
    out, err = capsys.readouterr()
    for word in (gone, "missing", "stray [x]", "not listed in COMMIT.json", "zarr.json", "edited or damaged metadata"):
        assert word in out
    assert f"error: {path} is damaged: " in err
    assert "[trace-damaged]" in err
    assert run(["inspect", str(path), "--verify", "--json"]) == 2
    document = json.loads(capsys.readouterr().out)
    assert {row["path"] for row in document["verify"]["damage"]} == {gone, "stray [x]", "zarr.json"}


def test_wrong_numbers_are_exit_2_after_the_table(
    make_trace: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    from kvtool.trace.commit import file_entry, seal
    from kvtool.trace.metadata import list_files

    path = make_trace()
    file = path / "sequences/0001/layers/03/zarr.json"
    file.write_text(file.read_text().replace('"scale": 0.3', '"scale": 0.35'))
    (path / "COMMIT.json").write_bytes(seal({name: file_entry(path / name) for name in list_files(path)})[0])
    assert run(["inspect", str(path), "--verify"]) == 2
    out, err = capsys.readouterr()
    assert out.count("off") == 1
    assert "in sequence 1, layer 3 (bound 1e-05" in err
    assert "[trace-inaccurate]" in err


def test_absent_samples_are_said(make_trace: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", str(make_trace(samples=False)), "--verify"]) == 0
    assert capsys.readouterr().out.count("no output sample stored: skipped") == 4


@pytest.mark.parametrize("options", [[], ["--verify"], ["--json"]])
@pytest.mark.parametrize(
    ("name", "code"), [("nothing", "file-missing"), ("note.txt", "trace-not"), ("partial", "trace-incomplete")]
)
def test_what_is_no_trace_is_exit_2_with_one_sentence_and_a_hint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, code: str, options: list[str]
) -> None:
    (tmp_path / "note.txt").write_text("hello")
    (tmp_path / "partial" / ".writing").mkdir(parents=True)
    assert run(["inspect", str(tmp_path / name), *options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert len(lines) == 2
    assert lines[0].endswith(f"[{code}]")
    assert lines[1].startswith("hint: ")
