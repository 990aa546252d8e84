"""Array: one stored array, written as Zarr v3 chunks and read back without trusting its metadata.

Uncompressed chunks are raw bytes, so they are read without Zarr; each chunk's checksum is
compared on the way, because a damaged number looks like any other.

Whole arrays, which replay works with for minutes, are read: who cuts a mapped file short kills the process that looks
at it (SIGBUS), and who writes into it changes numbers whose checksum was compared. One head alone, for a quick look, is
mapped where one chunk holds it: that takes half the CPU time of reading it.
"""

from __future__ import annotations

import itertools
import mmap
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import google_crc32c
import numpy as np
import torch
from torch import Tensor

from kvtool.errors import KvtoolError
from kvtool.trace.commit import Entry
from kvtool.trace.layout import DTYPE_ATTRIBUTE, FILL, ArrayInfo, chunk_shape, to_numpy, to_torch

if TYPE_CHECKING:
    import zarr  # slow to import, and needed for writing and for compressed chunks only


def create_group(root: Path, path: str, attributes: Mapping[str, Any]) -> None:
    """An empty Zarr group at `root/path`."""
    import zarr

    zarr.create_group(str(root / path), zarr_format=3, attributes=dict(attributes))


def create_array(root: Path, path: str, shape: tuple[int, ...], dtype: str, logical: str, archive: bool) -> zarr.Array:
    """An empty Zarr array at `root/path`.

    Args:
        dtype, logical: `uint16` and `bfloat16` for bfloat16 bits, else twice the same.
        archive: zstd frames with checksums instead of raw bytes.
    """
    import zarr
    from zarr.codecs import Crc32cCodec, ZstdCodec

    return zarr.create_array(
        str(root / path),
        shape=shape,
        chunks=chunk_shape(path.rsplit("/", 1)[-1], shape),
        dtype=dtype,
        fill_value=FILL[dtype],
        compressors=[ZstdCodec(level=1, checksum=True), Crc32cCodec()] if archive else [Crc32cCodec()],
        attributes={DTYPE_ATTRIBUTE: logical} if logical == "bfloat16" else {},
        config={"write_empty_chunks": True, "order": "C"},
        zarr_format=3,
    )


def write_array(root: Path, path: str, tensor: Tensor, *, archive: bool = False) -> None:
    """Store a tensor bit by bit."""
    values, logical = to_numpy(tensor)
    array = create_array(root, path, values.shape, str(values.dtype), logical, archive)
    if values.size:
        array[...] = values


def write_heads(
    root: Path,
    path: str,
    shape: tuple[int, int, int],
    dtype: str,
    logical: str,
    head: Callable[[int], np.ndarray],
    *,
    archive: bool = False,
) -> None:
    """Store [heads, n, width], asking `head(h)` for one [n, width] at a time."""
    array = create_array(root, path, shape, dtype, logical, archive)
    step = array.chunks[1]
    for h in range(shape[0]):
        rows = head(h)
        for start in range(0, shape[1], step):
            array[h, start : start + step] = rows[start : start + step]


def read_array(
    root: Path,
    info: ArrayInfo,
    entries: Mapping[str, Entry],
    head: int | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """A stored array as a tensor, the checksum of every chunk that is read compared.

    Args:
        head: read this one alone, [1, ...]; for arrays whose chunks hold one head each. Without `dtype`, and where
            one uncompressed chunk holds it, it is the file itself, mapped: valid as long as nobody cuts that short.
        dtype: of the tensor, None for the stored one. Chunks are converted as they come: never is there a second
            copy of the whole.

    Raises:
        KvtoolError: code `trace-damaged`, naming the chunk.
    """
    if info.compressed:
        found = to_torch(_read_frames(root, info, entries, head), info.logical)
        return found if dtype is None else found.to(dtype)
    shape = info.shape if head is None else (1, *info.shape[1:])
    if head is not None and info.chunk == shape:  # the chunk is the answer: nothing is copied
        chunk = _checked_chunk(root, info, next(_chunks(info, head)), entries, mapped=dtype is None)
        found = to_torch(chunk, info.logical)
        return found if dtype is None else found.to(dtype)
    stored = np.empty(shape if dtype is None else 0, dtype=info.dtype)
    converted = torch.empty(0 if dtype is None else shape, dtype=dtype)
    for index in _chunks(info, head):
        block = _checked_chunk(root, info, index, entries)
        index = index if head is None else (0, *index[1:])
        inside = tuple(
            slice(i * step, min((i + 1) * step, size))
            for i, step, size in zip(index, info.chunk, info.shape, strict=True)
        )
        rows = block[tuple(slice(0, part.stop - part.start) for part in inside)]
        if dtype is None:
            stored[inside] = rows
        else:
            converted[inside] = to_torch(rows.copy(), info.logical)
    return to_torch(stored, info.logical) if dtype is None else converted


def _checked_chunk(
    root: Path, info: ArrayInfo, index: tuple[int, ...], entries: Mapping[str, Entry], mapped: bool = False
) -> np.ndarray:
    """The elements of one uncompressed chunk, in its own shape, once its checksum was compared.

    Raises:
        KvtoolError: code `trace-damaged`.
    """
    name = "/".join([info.path, "c", *map(str, index)])
    raw = _file_bytes(root, name, entries[name].length, mapped=mapped)
    size = info.chunk_bytes
    payload = raw[:size]
    if google_crc32c.value(payload) != int.from_bytes(raw[size:].tobytes(), "little"):
        raise damaged(root, name, "its checksum does not match")
    return payload.view(info.dtype).reshape(info.chunk)


def _chunks(info: ArrayInfo, head: int | None) -> Iterator[tuple[int, ...]]:
    """Where the chunks of an array, or of one head of it, lie in its grid."""
    if head is not None and (info.chunk[0] != 1 or not 0 <= head < info.shape[0]):
        raise AssertionError(f"{info.path} has no chunks of head {head}")
    first, *others = (range(count) for count in info.grid)
    return itertools.product(first if head is None else (head,), *others)


def chunk_files(info: ArrayInfo, head: int | None = None) -> list[str]:
    """The files below the trace that reading an array, or one head of it, opens."""
    return ["/".join([info.path, "c", *map(str, index)]) for index in _chunks(info, head)]


def damaged(root: Path, name: str, what: str) -> KvtoolError:
    """The error for a file that is not what was written."""
    return KvtoolError(
        "trace-damaged",
        f"{root} is damaged: {name}: {what}",
        "kvtool inspect --verify names every damaged file; fetch or capture the trace again",
    )


def _file_bytes(root: Path, name: str, length: int, first: int | None = None, mapped: bool = False) -> np.ndarray:
    """A file's bytes, or the `first` of them, [n] uint8, its length checked against the commit file.

    Args:
        mapped: as a map instead of a copy. What is written into it stays in this process.

    Raises:
        KvtoolError: code `trace-damaged`, also for a file that is cut short meanwhile.
    """
    try:
        handle = os.open(root / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise damaged(root, name, f"cannot be opened ({error.strerror})") from None
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or status.st_size != length:
            raise damaged(root, name, f"has {status.st_size} bytes, expected {length}")
        if mapped:
            return np.frombuffer(mmap.mmap(handle, length, access=mmap.ACCESS_COPY), dtype=np.uint8)
        raw = np.empty(length if first is None else min(first, length), dtype=np.uint8)
        into, at = memoryview(raw), 0  # type: ignore[arg-type]
        while at < len(raw):
            try:
                got = os.readv(handle, [into[at:]])
            except OSError as error:
                raise damaged(root, name, f"cannot be read ({error.strerror})") from None
            if not got:
                raise damaged(root, name, f"ends after {at} bytes, expected {length}")
            at += got
        return raw
    finally:
        os.close(handle)


def _read_frames(root: Path, info: ArrayInfo, entries: Mapping[str, Entry], head: int | None) -> np.ndarray:
    """A zstd array through Zarr, after each frame's own header agreed to the size that metadata claims."""
    part = slice(None) if head is None else slice(head, head + 1)
    shape = info.shape if head is None else (1, *info.shape[1:])
    import zarr

    if 0 in info.shape:
        return np.empty(shape, dtype=info.dtype)
    for index in _chunks(info, head):
        name = "/".join([info.path, "c", *map(str, index)])
        claimed = frame_bytes(_file_bytes(root, name, entries[name].length, 18).tobytes())
        if claimed != info.chunk_bytes:
            raise damaged(root, name, f"unpacks to {claimed} bytes, expected {info.chunk_bytes}")
    try:
        values = np.array(zarr.open_array(str(root / info.path), mode="r", zarr_format=3)[part], order="C")
    except Exception as error:  # whatever a codec raises on damaged bytes
        raise damaged(root, info.path, f"cannot be unpacked ({type(error).__name__}: {error})") from None
    if values.shape != shape or str(values.dtype) != info.dtype:
        raise damaged(root, info.path, "unpacks to another shape or dtype")
    return values


def frame_bytes(head: bytes) -> int | None:
    """The unpacked size that a zstd frame declares (RFC 8878, section 3.1.1), None where it declares none."""
    if head[:4] != b"\x28\xb5\x2f\xfd" or len(head) < 6:
        return None
    descriptor = head[4]
    single, code = bool(descriptor & 0x20), descriptor >> 6
    width = (1 if single else 0, 2, 4, 8)[code]
    start = 5 + (0 if single else 1) + (0, 1, 2, 4)[descriptor & 3]
    field = head[start : start + width]
    if not width or len(field) < width:
        return None
    return int.from_bytes(field, "little") + (256 if width == 2 else 0)
