"""One head of an array, and all of it: never without a checksum, and files may change under what replay works with."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from kvtool.bench.storage import write_heads
from kvtool.errors import KvtoolError
from kvtool.trace import open_trace
from kvtool.trace.layout import CHUNK_TOKENS, layer_path

CHUNKS = Path(layer_path(0, 0)) / "keys" / "c"


def test_what_is_written_into_a_head_stays_in_this_process(tmp_path: Path) -> None:
    sequence = write_heads(tmp_path / "t.zarr", 70, 8, 2)
    file = tmp_path / "t.zarr" / CHUNKS / "1" / "0" / "0"
    before, head = file.read_bytes(), sequence.head("keys", 0, 1)
    again = head.clone()
    head.zero_()
    assert file.read_bytes() == before
    assert torch.equal(sequence.head("keys", 0, 1), again)
    assert bool((again != 0).any())
    assert not torch.equal(sequence.head("keys", 0, 0), again)


def test_a_file_that_is_cut_short_or_changed_later_does_no_harm(tmp_path: Path) -> None:
    sequence = write_heads(tmp_path / "t.zarr", 4096, 8, 2)  # several pages of memory
    file = tmp_path / "t.zarr" / CHUNKS / "1" / "0" / "0"
    whole, head = sequence.layer(0).keys, sequence.array("keys", 0, 1, torch.float32)
    before = whole.clone()
    file.write_bytes(b"\0" * file.stat().st_size)
    os.truncate(file, 10)
    assert torch.equal(whole, before)
    assert torch.equal(head[0], before[1])
    with pytest.raises(KvtoolError, match="has 10 bytes") as error:
        sequence.head("keys", 0, 1)
    assert error.value.code == "trace-damaged"


def test_a_file_that_is_cut_short_while_it_is_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sequence = write_heads(tmp_path / "t.zarr", 4096, 8, 2)
    file, readv = tmp_path / "t.zarr" / CHUNKS / "1" / "0" / "0", os.readv

    def cut(handle: int, buffers: list[memoryview]) -> int:
        if os.fstat(handle).st_ino == file.stat().st_ino:
            os.truncate(file, 5000)
        return readv(handle, buffers)

    monkeypatch.setattr(os, "readv", cut)
    with pytest.raises(KvtoolError, match="ends after 5000 bytes, expected 65540") as error:
        sequence.array("keys", 0)
    assert error.value.code == "trace-damaged"


@pytest.mark.parametrize("tokens", [63, CHUNK_TOKENS + 5])
def test_heads_are_the_array_in_one_chunk_and_in_several(tokens: int, tmp_path: Path) -> None:
    sequence = write_heads(tmp_path / "t.zarr", tokens, 4, 3)
    whole = sequence.array("keys", 0)
    assert whole.shape == (3, tokens, 4)
    assert all(torch.equal(sequence.head("keys", 0, head), whole[head]) for head in range(3))
    assert torch.equal(sequence.array("keys", 0, 2), whole[2:])


@pytest.mark.parametrize("place", [0, 17, -1])
def test_a_flipped_bit_of_a_head_is_found(place: int, tmp_path: Path) -> None:
    write_heads(tmp_path / "t.zarr", 70, 8, 2)
    file = tmp_path / "t.zarr" / CHUNKS / "1" / "0" / "0"
    raw = bytearray(file.read_bytes())
    raw[place] ^= 1
    file.write_bytes(bytes(raw))
    sequence = open_trace(tmp_path / "t.zarr").sequences[0]
    with pytest.raises(KvtoolError, match="checksum") as error:
        sequence.head("keys", 0, 1)
    assert error.value.code == "trace-damaged"
    assert sequence.head("keys", 0, 0).shape == (70, 8)
