"""Every way in which a trace can be damaged is caused, and found by name."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtool.errors import KvtoolError
from kvtool.trace import open_trace
from kvtool.trace.commit import read_commit
from kvtool.trace.metadata import list_files
from kvtool.trace.verify import damage_error, verify_bytes

CHUNK = "sequences/0000/layers/03/keys/c/1/0/0"
TWIN = "sequences/0000/layers/03/keys/c/0/0/0"


def found(path: Path) -> dict[str, str]:
    return {damage.path: damage.what for damage in verify_bytes(path).damage}


def flip(file: Path, offset: int, bit: int) -> None:
    raw = bytearray(file.read_bytes())
    raw[offset] ^= 1 << bit
    file.write_bytes(raw)


def test_a_sound_trace_has_no_damage(make_trace: Callable[..., Path]) -> None:
    path = make_trace()
    report = verify_bytes(path)
    assert report.damage == []
    assert report.files == len(list(list_files(path))) == 95
    assert report.total_bytes == sum((path / name).stat().st_size for name in list_files(path))


@pytest.mark.parametrize("archive", [False, True])
def test_a_flipped_bit_in_any_file_is_found(make_trace: Callable[..., Path], archive: bool) -> None:
    path = make_trace(archive=archive)
    for number, name in enumerate(list_files(path)):
        file = path / name
        sound = file.read_bytes()
        flip(file, (0, len(sound) // 2, len(sound) - 1)[number % 3], number % 8)
        assert list(found(path)) == [name]
        file.write_bytes(sound)
    assert found(path) == {}


def test_a_flipped_bit_anywhere_in_the_commit_file_is_found(make_trace: Callable[..., Path]) -> None:
    path = make_trace(lengths=(6,))
    file = path / "COMMIT.json"
    sound = file.read_bytes()
    for offset in range(len(sound)):
        flip(file, offset, offset % 8)
        with pytest.raises(KvtoolError) as caught:
            read_commit(path)
        assert caught.value.code in ("trace-damaged", "trace-unsafe")
        if offset % 997 == 0 or offset > len(sound) - 4:
            assert "COMMIT.json" in found(path)
        file.write_bytes(sound)
    assert found(path) == {}


@pytest.mark.parametrize("change", [b"", b" ", b"\n", b"{}"])
def test_appending_to_the_commit_file_is_found(make_trace: Callable[..., Path], change: bytes) -> None:
    path = make_trace(lengths=(6,))
    file = path / "COMMIT.json"
    file.write_bytes(file.read_bytes() + change if change else b"")
    assert "COMMIT.json" in found(path)
    with pytest.raises(KvtoolError):
        open_trace(path)


def test_damaged_commit_file_and_another_fault_are_both_named(make_trace: Callable[..., Path]) -> None:
    path = make_trace()
    raw = (path / "COMMIT.json").read_bytes()
    (path / "COMMIT.json").write_bytes(raw.replace(b'"format":1', b'"format":2'))
    flip(path / CHUNK, 9, 3)
    assert set(found(path)) == {"COMMIT.json", CHUNK}


def test_deleted_chunk(make_trace: Callable[..., Path]) -> None:
    path = make_trace()
    (path / CHUNK).unlink()
    assert found(path) == {CHUNK: "missing"}
    with pytest.raises(KvtoolError, match=f"{CHUNK}: is missing") as caught:
        open_trace(path)
    assert caught.value.code == "trace-damaged"


@pytest.mark.parametrize("name", [CHUNK, "zarr.json", "sequences/0001/tokens/c/0"])
def test_truncated_and_lengthened_files(make_trace: Callable[..., Path], name: str) -> None:
    path = make_trace()
    sound = (path / name).read_bytes()
    for raw, word in ((sound[:-1], "truncated"), (b"", "truncated"), (sound + b"\0", "too long")):
        (path / name).write_bytes(raw)
        assert list(found(path)) == [name]
        assert word in found(path)[name]
        with pytest.raises(KvtoolError, match=name) as caught:
            open_trace(path)
        assert caught.value.code == "trace-damaged"


def test_swapped_files_name_each_other(make_trace: Callable[..., Path]) -> None:
    path = make_trace()
    a, b = (path / CHUNK).read_bytes(), (path / TWIN).read_bytes()
    (path / CHUNK).write_bytes(b)
    (path / TWIN).write_bytes(a)
    open_trace(path)  # lengths agree, and opening checks no more of the arrays
    assert found(path) == {
        CHUNK: f"swapped: holds what belongs to {TWIN}",
        TWIN: f"swapped: holds what belongs to {CHUNK}",
    }


def test_unlisted_files_are_named(make_trace: Callable[..., Path]) -> None:
    path = make_trace()
    (path / "sequences/0000/layers/03/notes.txt").write_text("hello")
    (path / "sequences/0002").mkdir()
    (path / "sequences/0002/zarr.json").write_text("{}")
    assert found(path) == {
        "sequences/0000/layers/03/notes.txt": "not listed in COMMIT.json",
        "sequences/0002/zarr.json": "not listed in COMMIT.json",
    }
    assert len(open_trace(path).sequences) == 2  # what is not listed is not read


def test_an_edited_attribute_is_found_and_refused_at_opening(make_trace: Callable[..., Path]) -> None:
    path = make_trace()
    name = "sequences/0000/layers/03/zarr.json"
    raw = (path / name).read_bytes()
    assert b'"scale": 0.3' in raw
    (path / name).write_bytes(raw.replace(b'"scale": 0.3', b'"scale": 0.2'))  # same length
    assert found(path) == {name: "edited or damaged metadata"}
    with pytest.raises(KvtoolError, match="was altered"):
        open_trace(path)


def test_links_are_named(make_trace: Callable[..., Path], tmp_path: Path) -> None:
    path = make_trace()
    outside = tmp_path / "outside"
    shutil.copy(path / CHUNK, outside)
    (path / CHUNK).unlink()
    (path / CHUNK).symlink_to(outside)
    assert found(path) == {CHUNK: "not a regular file"}
    with pytest.raises(KvtoolError, match="no regular file"):
        open_trace(path)


def test_linked_folders_are_named(make_trace: Callable[..., Path], tmp_path: Path) -> None:
    path = make_trace()
    shutil.move(path / "sequences/0001", tmp_path / "moved")
    (path / "sequences/0001").symlink_to(tmp_path / "moved")
    assert all(what == "reached through a symbolic link" for name, what in found(path).items() if name.count("/") > 1)
    assert "sequences/0001/tokens/c/0" in found(path)
    with pytest.raises(KvtoolError, match="symbolic link"):
        open_trace(path)


def test_a_pipe_in_place_of_a_file_does_not_hang(make_trace: Callable[..., Path]) -> None:
    path = make_trace()
    (path / CHUNK).unlink()
    os.mkfifo(path / CHUNK)
    assert found(path) == {CHUNK: "not a regular file"}
    with pytest.raises(KvtoolError, match="no regular file"):
        open_trace(path)


@pytest.mark.parametrize("archive", [False, True])
def test_damage_behind_opening_is_found_when_the_array_is_read(make_trace: Callable[..., Path], archive: bool) -> None:
    path = make_trace(archive=archive)
    size = (path / CHUNK).stat().st_size
    for offset in range(0, size, 41):
        sound = (path / CHUNK).read_bytes()
        flip(path / CHUNK, offset, offset % 8)
        layer = open_trace(path).sequences[0].layer(11)  # reads the keys of layer 3
        with pytest.raises(KvtoolError, match="sequences/0000/layers/03/keys") as caught:
            _ = layer.keys
        assert caught.value.code == "trace-damaged"
        (path / CHUNK).write_bytes(sound)
    assert open_trace(path).sequences[0].layer(11).keys.shape == (2, 40, 6)


def test_a_file_that_goes_after_opening_is_an_error_and_no_fill_value(make_trace: Callable[..., Path]) -> None:
    path = make_trace()
    layer = open_trace(path).sequences[0].layer(3)
    (path / CHUNK).unlink()
    with pytest.raises(KvtoolError, match=f"{CHUNK}: cannot be opened"):
        _ = layer.keys


@pytest.mark.parametrize("archive", [False, True])
def test_an_all_zero_chunk_is_no_loss(make_trace: Callable[..., Path], archive: bool) -> None:
    path = make_trace(zero_values=True, archive=archive)
    assert (path / "sequences/0000/layers/03/values/c/1/0/0").is_file()
    assert found(path) == {}
    values = open_trace(path).sequences[0].layer(3).values
    assert int(values[1].count_nonzero()) == 0
    assert int(values[0].count_nonzero()) == 200


def test_many_faults_make_one_sentence(make_trace: Callable[..., Path]) -> None:
    path = make_trace()
    for name in list(list_files(path))[:8]:
        (path / name).unlink()
    error = damage_error(path, verify_bytes(path))
    assert error.code == "trace-damaged"
    assert error.message.endswith("; and 3 more")
    assert error.message.count("missing") == 5
