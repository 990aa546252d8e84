"""Reader: opens a trace after checking it, and hands out its layers lazily."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvtool.errors import KvtoolError
from kvtool.layer import Geometry, Layer
from kvtool.rotation import Rotation
from kvtool.trace.array import read_array
from kvtool.trace.attributes import parse_layer
from kvtool.trace.commit import Commit, read_commit, refuse_newer
from kvtool.trace.consistency import check_layer, check_sequence, sequence_fields
from kvtool.trace.layout import ATTRIBUTE, COMMIT, FLOATS, layer_path, projection_path, sequence_path
from kvtool.trace.metadata import Tree, check_lengths, read_tree
from kvtool.trace.publish import WRITING, siblings


@dataclass(frozen=True, eq=False)
class Trace:
    """An immutable store of one model's runs.

    Attributes:
        path: its folder.
        digest: SHA-256 over the list of all its files, 64 hex digits; names this very content.
        manifest: `format`, `model`, `tokenizer`, `capture` as the writer recorded them.
        sequences: the runs, in order.
        stored_dtype: dtype of queries, keys and values on disk.
    """

    path: Path
    commit: Commit = field(repr=False)
    tree: Tree = field(repr=False)
    manifest: dict[str, Any] = field(repr=False)
    sequences: list[Sequence] = field(default_factory=list, repr=False)

    @property
    def digest(self) -> str:
        """The trace digest."""
        return self.commit.digest

    @cached_property
    def layer_ids(self) -> list[int]:
        """Every layer that some sequence holds, ascending; ids are the model's own."""
        return sorted({layer for sequence in self.sequences for layer in sequence.layer_ids})

    @cached_property
    def stored_dtype(self) -> torch.dtype:
        """dtype of queries, keys and values on disk."""
        return FLOATS[next(info.logical for path, info in self.tree.arrays.items() if path.endswith("/queries"))]

    @property
    def total_bytes(self) -> int:
        """Bytes on disk of everything listed."""
        return self.commit.total_bytes


@dataclass(frozen=True, eq=False)
class Sequence:
    """One run of the model.

    Attributes:
        trace: the trace it belongs to.
        index: its number in the trace.
        attributes: everything recorded about the run: `id`, `segments`, generation settings, seed and so on.
        length: T, rows whose keys and values are stored.
        prompt_length: rows of the prompt.
        layer_ids: layers that are stored, ascending.
        parsed: layer id -> geometry without its arrays, and whether its keys are stored rotated.
    """

    trace: Trace = field(repr=False)
    index: int
    attributes: dict[str, Any] = field(repr=False)
    length: int
    prompt_length: int
    layer_ids: list[int]
    parsed: dict[int, tuple[Geometry, bool]] = field(repr=False)

    @property
    def id(self) -> str | None:
        """The name that the user gave this run, if any."""
        return self.attributes.get("id")

    @property
    def segments(self) -> list[Any]:
        """Named spans of rows, as recorded; empty where none were."""
        return self.attributes.get("segments") or []

    @property
    def prompt_digest(self) -> str:
        """Hex digest of the prompt; seeds random streams."""
        return str(self.attributes["prompt_digest"])

    @property
    def stored_dtype(self) -> torch.dtype:
        """dtype of queries, keys and values on disk."""
        return self.trace.stored_dtype

    def has_array(self, name: str, layer: int | None = None) -> bool:
        """Whether an array of this sequence, or of one of its layers, is stored."""
        return self._array_path(name, layer) in self.trace.tree.arrays

    def shape(self, name: str, layer: int | None = None) -> tuple[int, ...]:
        """The shape of a stored array, without reading it."""
        return self.trace.tree.arrays[self._array_path(name, layer)].shape

    def _array_path(self, name: str, layer: int | None) -> str:
        if name == "output_projection" and layer is not None:
            return projection_path(layer)
        return f"{sequence_path(self.index) if layer is None else layer_path(self.index, layer)}/{name}"

    def array(self, name: str, layer: int | None = None) -> Tensor:
        """A stored array in its stored dtype, read anew, every chunk's checksum compared."""
        path = self._array_path(name, layer)
        return read_array(self.trace.path, self.trace.tree.arrays[path], self.trace.commit.entries)

    @cached_property
    def tokens(self) -> Tensor:
        """[T] int32."""
        return self.array("tokens")

    @cached_property
    def positions(self) -> Tensor:
        """[T] int64 rotary positions."""
        return self.array("positions")

    @cached_property
    def _pieces(self) -> list[bytes] | None:
        if not self.has_array("text"):
            return None
        raw, ends = self.array("text").numpy().tobytes(), self.array("text_offsets")
        if int(ends[0]) != 0 or int(ends[-1]) != len(raw) or bool((ends.diff() < 0).any()):
            raise KvtoolError("trace-unsafe", f"text_offsets of sequence {self.index} do not divide its text")
        return [raw[a:b] for a, b in itertools.pairwise(ends.tolist())]

    def text(self, row: int) -> str:
        """The piece of text that token `row` stands for; bytes that are no whole character show as U+FFFD."""
        return "" if self._pieces is None else self._pieces[row].decode("utf-8", errors="replace")

    def texts(self) -> list[str]:
        """All pieces, T of them; empty strings where the trace holds no text."""
        return [self.text(row) for row in range(self.length)]

    def geometry(self, layer_id: int) -> Geometry:
        """Geometry of one layer, its sink logits and rotation included.

        Raises:
            KvtoolError: code `trace-lacks` for a layer that is not stored.
        """
        if layer_id not in self.parsed:
            raise KvtoolError(
                "trace-lacks",
                f"sequence {self.index} holds no layer {layer_id}",
                "its layers: " + ", ".join(map(str, self.layer_ids)),
            )
        geometry = self.parsed[layer_id][0]
        if isinstance(geometry.rotation, Rotation) and self.has_array("rotation_cos", layer_id):
            cos, sin = (self.array(name, layer_id) for name in ("rotation_cos", "rotation_sin"))
            geometry = replace(geometry, rotation=replace(geometry.rotation, cos=cos, sin=sin))
        if self.has_array("sink_logits", layer_id):
            geometry = replace(geometry, sink_logits=self.array("sink_logits", layer_id))
        return geometry

    def layer(self, layer_id: int, dtype: torch.dtype = torch.float32) -> Layer:
        """One layer; its arrays are read on first use and computed with in `dtype`.

        A layer that reads another layer's cache loads that layer's keys and values. Keys that were
        stored before their rotation are rotated.
        """
        geometry = self.geometry(layer_id)
        donor = layer_id if geometry.kv_source is None else geometry.kv_source
        loaders: dict[str, Callable[[], Tensor]] = {
            "queries": lambda: self.array("queries", layer_id),
            "keys": lambda: self._keys(donor),
            "values": lambda: self.array("values", donor),
        }
        for name in ("output_projection", "output_sample", "output_gradients", "gradient_steps"):
            if self.has_array(name, layer_id):
                loaders[name] = lambda name=name: self.array(name, layer_id)  # type: ignore[misc]
        return Layer(
            geometry=geometry,
            tokens=self.length,
            prompt_length=self.prompt_length,
            positions=self.positions,
            query_steps=self.array("query_steps", layer_id),
            prompt_digest=self.prompt_digest,
            loaders=loaders,
            dtype=dtype,
        )

    def _keys(self, donor: int) -> Tensor:
        keys = self.array("keys", donor)
        if self.parsed[donor][1]:
            return keys
        rotation = self.geometry(donor).rotation
        if rotation == "none":
            return keys
        if not isinstance(rotation, Rotation):
            raise KvtoolError(
                "trace-lacks",
                f"layer {donor} stores keys before their rotation, and that rotation is unknown",
                "import the dump again with the layer's rotation",
            )
        return rotation.rotate(keys.to(torch.float32), self.positions, torch.arange(self.length))


def open_trace(path: str | os.PathLike[str]) -> Trace:
    """Open a trace: format, commit file, lengths of all files and safety of all metadata are checked.

    Contents of arrays are compared with their checksums when they are read, and all at once by
    `kvtool inspect --verify`.

    Raises:
        KvtoolError: `file-missing`, `trace-not`, `trace-incomplete`, `trace-damaged`, `trace-unsafe`, `trace-format`.
    """
    root = Path(path)
    refuse_incomplete(root)
    return load_trace(root)


def load_trace(root: Path) -> Trace:
    """`open_trace` for a folder that may still be unpublished: the writer's last check of its own work."""
    commit = read_commit(root)
    check_lengths(root, commit)
    tree = read_tree(root, commit)
    manifest = tree.groups.get("", {}).get(ATTRIBUTE)
    if not isinstance(manifest, dict):
        raise KvtoolError("trace-unsafe", f"{root} has no manifest in the attribute {ATTRIBUTE}")
    refuse_newer(manifest.get("format"), root)
    trace = Trace(root, commit, tree, manifest)
    numbers = sorted(int(found[1]) for group in tree.groups if (found := re.match(r"sequences/(\d+)\Z", group)))
    if not numbers or numbers != list(range(len(numbers))):
        raise KvtoolError("trace-unsafe", f"{root} has the sequences {numbers}, expected 0, 1, 2 and so on")
    for index in numbers:
        trace.sequences.append(_sequence(trace, index))
    if (
        len({info.logical for name, info in tree.arrays.items() if name.endswith(("/queries", "/keys", "/values"))})
        != 1
    ):
        raise KvtoolError("trace-unsafe", f"{root} stores queries, keys and values in more than one dtype")
    return trace


def _sequence(trace: Trace, index: int) -> Sequence:
    path = sequence_path(index)
    attributes, length, prompt_length = sequence_fields(trace.tree.groups[path].get(ATTRIBUTE), f"sequence {index}")
    check_sequence(trace.tree, path, length)
    parsed: dict[int, tuple[Geometry, bool]] = {}
    prefix = f"{path}/layers/"
    for group, values in trace.tree.groups.items():
        if group.startswith(prefix):
            layer = int(group.removeprefix(prefix))
            recorded = f"{group}/rotation_cos" in trace.tree.arrays
            where = f"layer {layer} of sequence {index}"
            parsed[layer] = parse_layer(values.get(ATTRIBUTE), layer, where, recorded=recorded)
    for layer in parsed:
        check_layer(trace.tree, index, layer, {number: entry[0] for number, entry in parsed.items()}, length)
    if not parsed:
        raise KvtoolError("trace-unsafe", f"sequence {index} has no layers")
    return Sequence(trace, index, attributes, length, prompt_length, sorted(parsed), parsed)


def refuse_incomplete(root: Path) -> None:
    """Complain when there is no published trace at `root`, saying what is there instead.

    Raises:
        KvtoolError: `file-missing`, `trace-not` or `trace-incomplete`.
    """
    partials = [root] if (root / WRITING).is_dir() else [] if root.exists() else siblings(root, "partial")
    if partials:
        whole, planned = _progress(partials[-1])
        raise KvtoolError(
            "trace-incomplete",
            f"{root} is incomplete, {whole} of {planned} sequences whole: its writer was stopped or is still running",
            "write it again; what is left over is removed by that",
        )
    if not root.exists():
        older = siblings(root, "replaced")
        if older:
            raise KvtoolError(
                "trace-incomplete",
                f"{root} is incomplete: its writer was stopped while it replaced an older trace",
                f"the older one is whole: mv {older[-1]} {root}",
            )
        raise KvtoolError("file-missing", f"{root} does not exist", "kvtool capture and kvtool import write traces")
    if not (root / COMMIT).exists():
        what = (
            "has no COMMIT.json, so it was never completed" if (root / "zarr.json").exists() else "is no kvtool trace"
        )
        code = "trace-incomplete" if (root / "zarr.json").exists() else "trace-not"
        raise KvtoolError(code, f"{root} {what}", "a trace is a folder that kvtool capture or kvtool import wrote")


def _progress(partial: Path) -> tuple[int, int]:
    """Sequences that are whole, and how many there should be."""
    writing = partial / WRITING
    if not writing.is_dir():  # every sequence is whole, only the last rename is missing
        count = sum(1 for _ in (partial / "sequences").glob("[0-9]*")) if (partial / "sequences").is_dir() else 0
        return count, count
    whole = sum(1 for _ in writing.glob("*.whole"))
    planned = writing / "planned"
    written = planned.read_text().strip() if planned.is_file() else ""
    return whole, max(whole, int(written) if written.isdigit() else 0)
