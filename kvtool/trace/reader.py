"""Reader: a trace that was checked, and its layers, lazily."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvtool.errors import KvtoolError
from kvtool.layer import Geometry, Gradients, Layer
from kvtool.rotation import Rotation
from kvtool.trace.array import chunk_files, read_array
from kvtool.trace.commit import Commit
from kvtool.trace.consistency import steps_fault
from kvtool.trace.gradients import gradient_steps_fault
from kvtool.trace.layout import FLOATS, layer_path, projection_path, sequence_path
from kvtool.trace.metadata import Tree
from kvtool.trace.remote import Mirror


@dataclass(frozen=True, eq=False)
class Trace:
    """An immutable store of one model's runs.

    Attributes:
        path: its folder.
        digest: SHA-256 over the list of all its files, 64 hex digits; names this very content.
        manifest: `format`, `model`, `tokenizer`, `capture` as the writer recorded them.
        sequences: the runs, in order.
        mirror: what fetches the files of a trace that lies elsewhere into `path`.
        stored_dtype: dtype of queries, keys and values on disk.
    """

    path: Path
    commit: Commit = field(repr=False)
    tree: Tree = field(repr=False)
    manifest: dict[str, Any] = field(repr=False)
    sequences: list[Sequence] = field(default_factory=list, repr=False)
    mirror: Mirror | None = field(default=None, repr=False)

    @property
    def digest(self) -> str:
        """The trace digest."""
        return self.commit.digest

    @property
    def address(self) -> str:
        """Where another process finds it: an absolute path, or the address that it was opened at."""
        return str(self.path.absolute()) if self.mirror is None else self.mirror.address

    @property
    def shown(self) -> str:
        """What a user calls it: the path or address that it was opened at."""
        return str(self.path) if self.mirror is None else self.mirror.address

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
        gradients: how the layers' `output_gradients` were drawn, None where the trace holds none.
    """

    trace: Trace = field(repr=False)
    index: int
    attributes: dict[str, Any] = field(repr=False)
    length: int
    prompt_length: int
    layer_ids: list[int]
    parsed: dict[int, tuple[Geometry, bool]] = field(repr=False)
    gradients: Gradients | None = None

    @property
    def id(self) -> str | None:
        """The name that the user gave this run, if any."""
        return self.attributes.get("id")

    @property
    def segments(self) -> list[Any]:
        """Named spans of rows, as recorded; empty where none were."""
        return self.attributes.get("segments") or []

    @property
    def landmarks(self) -> dict[str, list[int]]:
        """Name -> ascending rows that are known to matter; empty where none were recorded."""
        return self.attributes.get("landmarks") or {}

    @property
    def synthetic(self) -> dict[str, Any] | None:
        """`name`, `seed`, `answer` and perhaps `depth` of a constructed sequence; None for a model's run."""
        return self.attributes.get("synthetic")

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

    def array(
        self, name: str, layer: int | None = None, head: int | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """A stored array, or one `head` of it [1, ...], in its stored dtype or in `dtype`, read anew, checksums
        compared."""
        info, mirror = self.trace.tree.arrays[self._array_path(name, layer)], self.trace.mirror
        if mirror is None:
            return read_array(self.trace.path, info, self.trace.commit.entries, head, dtype)
        with mirror.speaking():
            mirror.need(chunk_files(info, head))
            return read_array(self.trace.path, info, self.trace.commit.entries, head, dtype)

    def head(self, name: str, layer: int, head: int) -> Tensor:
        """[n, dim] of one head of a layer's own `queries`, `keys` (rotated), `values` or `output_sample`.

        It may be a map of its file: somebody who cuts that file short while the tensor is in use ends this process.
        Keep a `clone()` of it, which costs a copy, where that can happen; `array` and `layer` always copy.
        """
        return (self._keys(layer, head) if name == "keys" else self.array(name, layer, head))[0]

    @cached_property
    def tokens(self) -> Tensor:
        """[T] int32.

        Raises:
            KvtoolError: code `trace-unsafe` for a negative one.
        """
        tokens = self.array("tokens")
        if int(tokens.min()) < 0:
            row = int((tokens < 0).nonzero()[0])
            raise KvtoolError("trace-unsafe", f"sequence {self.index} has the token {int(tokens[row])} in row {row}")
        return tokens

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
        geometry = replace(self.parsed[layer_id][0], element_bytes=self.stored_dtype.itemsize)
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
            "queries": lambda: self.array("queries", layer_id, dtype=dtype),
            "keys": lambda: self._keys(donor, dtype=dtype),
            "values": lambda: self.array("values", donor, dtype=dtype),
        }
        for name in ("output_projection", "output_sample", "output_gradients"):
            if self.has_array(name, layer_id):
                loaders[name] = lambda name=name: self.array(name, layer_id)  # type: ignore[misc]
        drawn = self.has_array("output_gradients", layer_id)
        return Layer(
            geometry=geometry,
            tokens=self.length,
            prompt_length=self.prompt_length,
            positions=self.positions,
            query_steps=self.query_steps(layer_id),
            prompt_digest=self.prompt_digest,
            loaders=loaders,
            dtype=dtype,
            gradients=self.gradients if drawn else None,
            gradient_steps=self.gradient_steps if drawn else None,
        )

    @cached_property
    def gradient_steps(self) -> Tensor | None:
        """[Tg] int64, the consecutive rows with gradients, the same in every layer that has any; None where none has.

        Raises:
            KvtoolError: code `trace-unsafe`, naming the layer whose steps are others.
        """
        found: Tensor | None = None
        for layer_id in self.layer_ids:
            if self.gradients is None or not self.has_array("gradient_steps", layer_id):
                continue
            steps = self.array("gradient_steps", layer_id)
            fault = gradient_steps_fault(self.gradients, steps, self.length, self.prompt_length)
            if fault is None and found is not None and not torch.equal(found, steps):
                fault = "gradient steps that differ from those of the layers before it"
            if fault is not None:
                raise KvtoolError("trace-unsafe", f"layer {layer_id} of sequence {self.index} has {fault}")
            found = steps
        return found

    def query_steps(self, layer_id: int) -> Tensor:
        """[Tq] int64, the rows whose queries are stored, ascending.

        Raises:
            KvtoolError: code `trace-unsafe` where they do not ascend within the sequence.
        """
        steps = self.array("query_steps", layer_id)
        fault = steps_fault(steps, self.length)
        if fault is not None:
            raise KvtoolError("trace-unsafe", f"layer {layer_id} of sequence {self.index} has {fault}")
        return steps

    def _keys(self, donor: int, head: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
        if self.parsed[donor][1]:
            return self.array("keys", donor, head, dtype)
        keys = self.array("keys", donor, head)
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
