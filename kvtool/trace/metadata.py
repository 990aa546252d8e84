"""Metadata: every zarr.json of a trace, checked against the format and against its files before anything is decoded.

Nothing here allocates by a size that metadata claims: shapes are compared with the lengths of
the chunk files that the commit file lists, and those were compared with the disk.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtool.errors import KvtoolError
from kvtool.trace.array import damaged
from kvtool.trace.commit import Commit, Entry, parse_json
from kvtool.trace.layout import (
    CHECKSUM_BYTES,
    COMMIT,
    DTYPE_ATTRIBUTE,
    ITEM_BYTES,
    LAYER_ARRAYS,
    MODEL_ARRAYS,
    SEQUENCE_ARRAYS,
    ArrayInfo,
    chunk_shape,
)

MOST_METADATA_BYTES = 64 << 20
MOST_SIZE = 1 << 40
ZSTD_RATIO = 50_000  # a zstd block of 4 bytes repeats at most 128 KiB, so no frame packs tighter

_NUMBER = r"(?:0|[1-9]\d{0,8})"
_GROUPS = re.compile(r"(|model|model/layers(/\d{2,9})?|sequences|sequences/\d{4,9}(/layers(/\d{2,9})?)?)\Z")
_CHUNK = re.compile(rf"(?P<array>.+)/c(?P<index>(/{_NUMBER})+)\Z")
_ARRAY_FIELDS = {
    "zarr_format",
    "node_type",
    "shape",
    "data_type",
    "chunk_grid",
    "chunk_key_encoding",
    "fill_value",
    "codecs",
    "attributes",
    "storage_transformers",
    "dimension_names",
}


@dataclass(frozen=True)
class Tree:
    """What a trace's metadata says.

    Attributes:
        groups: path -> attributes.
        arrays: path -> ArrayInfo.
    """

    groups: dict[str, dict[str, Any]] = field(default_factory=dict)
    arrays: dict[str, ArrayInfo] = field(default_factory=dict)


def check_lengths(root: Path, commit: Commit) -> None:
    """Hold every listed file against the disk: a regular file of that length, reached through real folders.

    Raises:
        KvtoolError: code `trace-damaged`, naming the first file that is not.
    """
    folders: set[str] = {""}
    top = os.path.join(os.fspath(root), "")
    for name, entry in commit.entries.items():
        folder = name.rpartition("/")[0]
        while folder not in folders:  # those above it first seen together with it
            if os.path.islink(top + folder):
                raise damaged(root, folder, "is a symbolic link")
            folders.add(folder)
            folder = folder.rpartition("/")[0]
        try:
            status = os.lstat(top + name)
        except OSError:
            raise damaged(root, name, "is missing") from None
        if not stat.S_ISREG(status.st_mode):
            raise damaged(root, name, "is no regular file")
        if status.st_size != entry.length:
            raise damaged(root, name, f"has {status.st_size} bytes, expected {entry.length}")


def read_tree(root: Path, commit: Commit) -> Tree:
    """Parse and check all metadata of a trace whose lengths were checked.

    Raises:
        KvtoolError: `trace-damaged` where a metadata file was altered, `trace-unsafe` where it was written to deceive.
    """
    tree = Tree()
    chunks: dict[str, dict[tuple[int, ...], int]] = {}
    documents: dict[str, Any] = {}
    for name, entry in commit.entries.items():
        found = _CHUNK.match(name)
        if found:
            index = tuple(int(part) for part in found["index"][1:].split("/"))
            chunks.setdefault(found["array"], {})[index] = entry.length
        elif name == "zarr.json" or name.endswith("/zarr.json"):
            if entry.length > MOST_METADATA_BYTES:
                raise _unsafe(root, name, f"has {entry.length} bytes, more than metadata may have")
            raw = (root / name).read_bytes()
            if Entry(len(raw), hashlib.sha256(raw).hexdigest()) != entry:
                raise damaged(root, name, "was altered")
            documents[name.removesuffix("zarr.json").rstrip("/")] = parse_json(raw, name)
        else:
            raise _unsafe(root, name, "is no part of format 1")
    for path, document in documents.items():
        where = f"{path}/zarr.json".lstrip("/")
        if not isinstance(document, dict) or document.get("zarr_format") != 3:
            raise _unsafe(root, where, "is not Zarr format 3")
        if document.get("node_type") == "group":
            if not _GROUPS.match(path):
                raise _unsafe(root, where, "is a group that format 1 does not have")
            tree.groups[path] = _attributes(root, where, document)
        else:
            tree.arrays[path] = _array(root, path, document, chunks.pop(path, {}))
    if chunks:
        raise _unsafe(root, next(iter(chunks)), "has chunks but no metadata")
    return tree


def _unsafe(root: Path, name: str, what: str) -> KvtoolError:
    return KvtoolError("trace-unsafe", f"{root}: {name} {what}", "do not trust where this trace came from")


def _attributes(root: Path, where: str, document: Mapping[str, Any]) -> dict[str, Any]:
    attributes = document.get("attributes", {})
    known = {"zarr_format", "node_type", "attributes", "consolidated_metadata"}
    consolidated = document.get("consolidated_metadata")  # Zarr 3.0 writes null
    if not isinstance(attributes, dict) or set(document) - known or consolidated is not None:
        raise _unsafe(root, where, "holds more than the attributes of a group")
    return attributes


def _expected(path: str) -> tuple[str, int] | None:
    """Data type and rank that the format gives the array at `path`."""
    parent, _, name = path.rpartition("/")
    if re.match(r"sequences/\d{4,9}\Z", parent):
        table = SEQUENCE_ARRAYS
    elif re.match(r"sequences/\d{4,9}/layers/\d{2,9}\Z", parent):
        table = LAYER_ARRAYS
    elif re.match(r"model/layers/\d{2,9}\Z", parent):
        table = MODEL_ARRAYS
    else:
        return None
    kind, dims = table.get(name, (None, ""))
    return None if kind is None else (kind, len(dims.split()))


def _sizes(values: Any, low: int) -> tuple[int, ...] | None:
    if not isinstance(values, list) or len(values) > 4:
        return None
    if not all(isinstance(x, int) and not isinstance(x, bool) and low <= x <= MOST_SIZE for x in values):
        return None
    return tuple(values)


def _codecs(root: Path, where: str, codecs: Any, dtype: str) -> bool:
    """Whether chunks are zstd frames. The chain is `bytes`, perhaps `zstd`, then `crc32c`."""
    names: list[Any] = []
    for codec in codecs if isinstance(codecs, list) else []:
        name = codec.get("name") if isinstance(codec, dict) else codec
        configuration = codec.get("configuration", {}) if isinstance(codec, dict) else {}
        if name not in ("bytes", "zstd", "crc32c"):
            raise _unsafe(root, where, f"asks for the codec {str(name)[:40]!r}; allowed are bytes, zstd and crc32c")
        endian_fits = name != "bytes" or ITEM_BYTES[dtype] == 1 or configuration == {"endian": "little"}
        if not isinstance(configuration, dict) or not endian_fits:
            raise _unsafe(root, where, f"configures the codec {name} in a way that format 1 does not allow")
        names.append(name)
    if names not in (["bytes", "crc32c"], ["bytes", "zstd", "crc32c"]):
        raise _unsafe(root, where, f"chains the codecs {names}; allowed is bytes, perhaps zstd, then crc32c")
    return "zstd" in names


def _array(root: Path, path: str, document: Mapping[str, Any], chunks: Mapping[tuple[int, ...], int]) -> ArrayInfo:
    where = f"{path}/zarr.json"
    expected = _expected(path)
    if expected is None or document.get("node_type") != "array":
        raise _unsafe(root, where, "is an array that format 1 does not have")
    if set(document) - _ARRAY_FIELDS or document.get("storage_transformers") not in (None, []):
        raise _unsafe(root, where, "holds fields that format 1 does not allow")
    dtype = document.get("data_type")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise _unsafe(root, where, f"has the data type {str(dtype)[:40]!r}; allowed are {', '.join(ITEM_BYTES)}")
    attributes = document.get("attributes", {})
    if attributes not in ({}, {DTYPE_ATTRIBUTE: "bfloat16"}) or (dtype == "uint16") != bool(attributes):
        raise _unsafe(root, where, f"must have {DTYPE_ATTRIBUTE} bfloat16 on uint16 and no other attribute")
    logical = "bfloat16" if dtype == "uint16" else dtype
    kind, rank = expected
    if logical not in (("float32", "float16", "bfloat16") if kind == "float" else (kind,)):
        raise _unsafe(root, where, f"is {logical}, expected {'a float type' if kind == 'float' else kind}")
    shape = _sizes(document.get("shape"), 0)
    if shape is None or len(shape) != rank:
        raise _unsafe(
            root,
            where,
            f"has the shape {str(document.get('shape'))[:60]}, expected {rank} dimensions, none above {MOST_SIZE}",
        )
    chunk = _regular_chunk(document)
    if chunk is None or chunk != chunk_shape(path.rsplit("/", 1)[-1], shape):
        raise _unsafe(root, where, "has chunks other than one head and at most 16,384 tokens")
    compressed = _codecs(root, where, document.get("codecs"), dtype)
    info = ArrayInfo(path, dtype, logical, shape, chunk, compressed)
    _hold_against_files(root, info, chunks)
    return info


def _regular_chunk(document: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The chunk shape of a regular grid with keys c/0/0, None for any other."""
    grid, keys = document.get("chunk_grid"), document.get("chunk_key_encoding")
    if not isinstance(grid, dict) or set(grid) != {"name", "configuration"} or grid["name"] != "regular":
        return None
    if keys not in ({"name": "default"}, {"name": "default", "configuration": {"separator": "/"}}):
        return None
    configuration = grid["configuration"]
    if not isinstance(configuration, dict) or set(configuration) != {"chunk_shape"}:
        return None
    return _sizes(configuration["chunk_shape"], 1)


def _hold_against_files(root: Path, info: ArrayInfo, chunks: Mapping[tuple[int, ...], int]) -> None:
    count = math.prod(info.grid)
    if count != len(chunks):
        raise _unsafe(
            root, info.path, f"claims the shape {list(info.shape)}, {count} chunks, but has {len(chunks)} chunk files"
        )
    for index, length in chunks.items():
        inside = len(index) == len(info.grid) and all(i < n for i, n in zip(index, info.grid, strict=True))
        payload = length - CHECKSUM_BYTES
        fits = (
            payload > 0 and info.chunk_bytes <= ZSTD_RATIO * payload if info.compressed else payload == info.chunk_bytes
        )
        if not inside or not fits:
            raise _unsafe(
                root,
                f"{info.path}/c/{'/'.join(map(str, index))}",
                f"has {length} bytes, which does not fit the shape {list(info.shape)}",
            )


def list_files(root: Path) -> Iterator[str]:
    """Every file below a trace but the commit file, links not followed; what is no folder counts as a file."""
    pending = [root]
    while pending:
        for path in sorted(pending.pop().iterdir()):
            if path.is_dir() and not path.is_symlink():
                pending.append(path)
            elif path != root / COMMIT:
                yield path.relative_to(root).as_posix()
