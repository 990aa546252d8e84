"""Writer: builds a trace sequence by sequence; nothing is visible under its name before it is whole."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from kvtool.errors import KvtoolError
from kvtool.files import fsync_file, fsync_folder, write_durably, writing
from kvtool.layer import Geometry
from kvtool.shapes import expect_shapes
from kvtool.trace.array import create_group, write_array
from kvtool.trace.commit import Entry, file_entry, seal
from kvtool.trace.layout import (
    ATTRIBUTE,
    COMMIT,
    FLOATS,
    FORMAT,
    dtype_name,
    projection_path,
)
from kvtool.trace.opening import load_trace
from kvtool.trace.publish import WRITING, Publication
from kvtool.trace.reader import Trace
from kvtool.trace.sequence_writer import SequenceWriter


def _json(value: Mapping[str, Any], what: str) -> dict[str, Any]:
    """A private copy of `value`, which must be JSON without NaN."""
    try:
        copy: dict[str, Any] = json.loads(json.dumps(dict(value), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise KvtoolError("internal", f"{what} cannot be stored as JSON: {error}") from None
    return copy


class TraceWriter:
    """One trace being written. Use it in a `with` block: leaving it normally commits, an exception leaves nothing.

    Args:
        path: where the finished trace appears.
        model, tokenizer, capture: the manifest; `capture["run_dtype"]` is the dtype the model ran in.
            `capture` may be changed until the commit.
        dtype: stored dtype of queries, keys and values.
        force: replace a trace that is already there (it stays until the new one is whole).
        archive: pack chunks with zstd.
        planned: how many sequences there will be, said by whoever finds the trace incomplete.
        check: called with the finished trace before it is published; raising leaves nothing, and an
            older trace stays where it is.

    Raises:
        KvtoolError: `output-exists`, `locked`, `disk-full`, `write-failed`, `dtype`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        model: Mapping[str, Any],
        tokenizer: Mapping[str, Any] | None,
        capture: Mapping[str, Any],
        dtype: torch.dtype,
        force: bool = False,
        archive: bool = False,
        planned: int | None = None,
        check: Callable[[Trace], None] | None = None,
    ) -> None:
        if dtype not in FLOATS.values():
            raise KvtoolError("dtype", f"{dtype_name(dtype)} cannot be stored in a trace", "use " + ", ".join(FLOATS))
        self.model, self.tokenizer, self.capture = dict(model), tokenizer, dict(capture)
        self.dtype, self.archive = dtype, archive
        self._planned, self._check = planned, check
        self._sequences: list[SequenceWriter] = []
        self._projections: dict[int, tuple[int, ...]] = {}
        self._entries: dict[str, Entry] = {}
        self._publication = Publication(Path(path), force=force)
        self.path, self.root = self._publication.path, self._publication.partial
        self._note_plan()

    def _note_plan(self) -> None:
        with writing(self.path):
            planned = max(self._planned or 0, len(self._sequences))
            write_durably(self.root / WRITING / "planned", f"{planned}\n".encode())

    def output_projection(self, layer: int, projection: Tensor) -> None:
        """Store a layer's output projection [H, Dv, M] bit by bit, in its own dtype (float32, float16 or bfloat16)."""
        if not expect_shapes(output_projection=(projection, "H Dv M"))["M"]:
            raise KvtoolError("shape", f"the output projection of layer {layer} has no outputs")
        if dtype_name(projection.dtype) not in FLOATS:
            raise KvtoolError("dtype", f"an output projection in {dtype_name(projection.dtype)} cannot be stored")
        if not bool(torch.isfinite(projection).all()):
            raise KvtoolError("not-finite", f"the output projection of layer {layer} holds NaN or infinity")
        with writing(self.path):
            write_array(self.root, projection_path(layer), projection, archive=self.archive)
        self._projections[layer] = tuple(projection.shape)

    def sequence(
        self,
        geometries: Mapping[int, Geometry],
        *,
        prompt_length: int,
        attributes: Mapping[str, Any] | None = None,
        keys_rotated: bool | Mapping[int, bool] = True,
    ) -> SequenceWriter:
        """Begin the next sequence; the one before must be finished.

        Args:
            geometries: layer id -> Geometry.
            prompt_length: rows of the prompt.
            attributes: `id`, `segments`, `prompt_digest` (default: SHA-256 of the prompt's int32 tokens) and
                whatever else describes this run, such as generation settings and seed.
            keys_rotated: whether keys are given as the model rotated them, for all layers or for each.
        """
        if self._sequences and not self._sequences[-1].finished:
            raise KvtoolError("internal", f"sequence {len(self._sequences) - 1} is not finished yet")
        for layer, geometry in geometries.items():
            sizes = (geometry.query_heads, geometry.kv_heads, geometry.key_dim, geometry.value_dim)
            if min(sizes) < 1:
                raise KvtoolError("shape", f"layer {layer} has [H, Hk, D, Dv] = {list(sizes)}: none may be 0")
        rotated = dict.fromkeys(geometries, keys_rotated) if isinstance(keys_rotated, bool) else dict(keys_rotated)
        sequence = SequenceWriter(
            self, len(self._sequences), geometries, prompt_length, _json(attributes or {}, "attributes"), rotated
        )
        self._sequences.append(sequence)
        self._note_plan()
        return sequence

    def commit(self) -> None:
        """Publish: list every file, seal the list, rename into place."""
        if not self._sequences or not self._sequences[-1].finished:
            raise KvtoolError("internal", "a trace needs at least one sequence, and each must be finished")
        manifest = {
            "format": FORMAT,
            "model": _json(self.model, "model"),
            "tokenizer": None if self.tokenizer is None else _json(self.tokenizer, "tokenizer"),
            "capture": {**_json(self.capture, "capture"), "stored_dtype": dtype_name(self.dtype)},
        }
        with writing(self.path):
            create_group(self.root, "", {ATTRIBUTE: manifest})
            create_group(self.root, "sequences", {})
            if self._projections:
                create_group(self.root, "model", {})
                create_group(self.root, "model/layers", {})
                for layer in sorted(self._projections):
                    create_group(self.root, projection_path(layer).rsplit("/", 1)[0], {})
            self.settle("")
            sealed, _ = seal(self._entries)
            write_durably(self.root / COMMIT, sealed)
            self._refuse_unreadable()
        self._publication.publish()

    def _refuse_unreadable(self) -> None:
        """What cannot be opened, or what the caller's check refuses, is not published."""
        try:
            trace = load_trace(self.root)
        except KvtoolError as error:
            raise KvtoolError("shape", f"what was written does not fit together: {error.message}") from error
        if self._check is not None:
            self._check(trace)

    def projection_shape(self, layer: int) -> tuple[int, ...] | None:
        """[H, Dv, M] of a layer's output projection, None where none was given so far."""
        return self._projections.get(layer)

    def settle(self, below: str) -> None:
        """Fsync every file and folder below, and note length and SHA-256 of each file not yet noted."""
        for folder, folders, files in os.walk(self.root / below):
            if WRITING in folders:
                folders.remove(WRITING)
            for name in files:
                path = Path(folder) / name
                key = path.relative_to(self.root).as_posix()
                if key not in self._entries:
                    fsync_file(path)
                    self._entries[key] = file_entry(path)
            fsync_folder(Path(folder))

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if error is None:
                self.commit()
        finally:
            self._publication.abandon()
