"""Sequence writer: spools what a run computes, then turns it into chunks once its length is known."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from kvtool.errors import KvtoolError
from kvtool.files import write_durably, writing
from kvtool.layer import Geometry, Gradients
from kvtool.shapes import expect_shapes
from kvtool.trace.array import create_group, write_array, write_heads
from kvtool.trace.attributes import layer_attributes
from kvtool.trace.consistency import steps_fault
from kvtool.trace.gradients import gradient_attributes, gradient_steps_fault, stored_gradients, targets_fault
from kvtool.trace.layout import ATTRIBUTE, layer_path, sequence_path, to_numpy
from kvtool.trace.publish import WRITING
from kvtool.trace.spool import Spool


class Host(Protocol):
    """What a sequence needs of the trace it is written into (TraceWriter)."""

    path: Path
    root: Path
    dtype: torch.dtype
    archive: bool

    def projection_shape(self, layer: int) -> tuple[int, ...] | None: ...

    def settle(self, below: str) -> None: ...


class SequenceWriter:
    """One sequence being written: `append` while the model runs, `finish` once its length is known."""

    def __init__(
        self,
        trace: Host,
        index: int,
        geometries: Mapping[int, Geometry],
        prompt_length: int,
        attributes: dict[str, Any],
        keys_rotated: dict[int, bool],
    ) -> None:
        self.index, self.finished = index, False
        self._trace, self._geometries, self._keys_rotated = trace, dict(geometries), keys_rotated
        self._prompt_length, self._attributes = prompt_length, attributes
        self._spools: dict[tuple[int, str], Spool] = {}
        self._steps: dict[int, list[Tensor]] = {layer: [] for layer in geometries}
        for layer in geometries:
            for name in ("queries", "keys", "values"):
                stem = trace.root / WRITING / f"{index:04d}.{layer}.{name}"
                self._spools[layer, name] = Spool(stem, trace.dtype, f"layer {layer} {name}")

    def append(
        self,
        layer: int,
        *,
        keys: Tensor | None = None,
        values: Tensor | None = None,
        queries: Tensor | None = None,
        query_steps: Tensor | None = None,
    ) -> None:
        """Append what one forward pass computed in one layer.

        Args:
            layer: one of the layers that `sequence` was given.
            keys: [Hk, n, D] and values [Hk, n, Dv] of the next n rows.
            queries: [H, n, D] with the rows they belong to in `query_steps` [n], ascending.
        """
        geometry = self._geometries[layer]
        if geometry.kv_source is not None and (keys is not None or values is not None):
            raise KvtoolError("internal", f"layer {layer} reads the keys of layer {geometry.kv_source}; it has none")
        if (keys is None) != (values is None) or (queries is None) != (query_steps is None):
            raise KvtoolError("internal", "keys come with values, and queries with query_steps")
        try:
            expect_shapes(
                keys=(keys, f"{geometry.kv_heads} n {geometry.key_dim}"),
                values=(values, f"{geometry.kv_heads} n {geometry.value_dim}"),
            )
            expect_shapes(
                queries=(queries, f"{geometry.query_heads} m {geometry.key_dim}"), query_steps=(query_steps, "m")
            )
        except KvtoolError as error:
            raise KvtoolError(error.code, f"layer {layer} of sequence {self.index}: {error.message}") from None
        with writing(self._trace.path):
            for name, block in (("keys", keys), ("values", values), ("queries", queries)):
                if block is not None:
                    self._spools[layer, name].append(block)
        if query_steps is not None:
            self._steps[layer].append(query_steps.detach().to(device="cpu", dtype=torch.int64, copy=True))

    def finish(
        self,
        *,
        tokens: Tensor,
        positions: Tensor,
        text: Sequence[bytes] | None = None,
        output_samples: Mapping[int, Tensor] | None = None,
        geometries: Mapping[int, Geometry] | None = None,
        gradients: Gradients | None = None,
        gradient_steps: Tensor | None = None,
        output_gradients: Mapping[int, Tensor] | None = None,
    ) -> None:
        """Turn the spool files into chunks and mark the sequence as whole.

        Args:
            tokens: [T], the tokens whose keys and values were appended.
            positions: [T] rotary positions.
            text: T pieces of UTF-8 that the tokens stand for; None where unknown.
            output_samples: layer -> [H, n, Dv], the model's own attention output of the last n query steps.
            geometries: the final ones, where the run found out more (rotation, sink logits).
            gradients: how the gradients were drawn, where there are any.
            gradient_steps: [Tg] rows of the gradients, consecutive, the targets among them.
            output_gradients: layer -> [S, H, Tg, Dv] in any float dtype, rounded once to the trace's.

        Raises:
            KvtoolError: `shape`; `not-finite`, `overflow` for gradients that the stored dtype cannot hold.
        """
        if geometries is not None:
            self._geometries = {layer: geometries[layer] for layer in self._geometries}
        tokens = tokens.detach().cpu().to(torch.int32)
        count = expect_shapes(tokens=(tokens, "T"), positions=(positions, "T"))["T"]
        if not 0 <= self._prompt_length <= count or not count:
            raise KvtoolError("shape", f"a prompt of {self._prompt_length} tokens in a sequence of {count}")
        if int(tokens.min()) < 0:
            raise KvtoolError("shape", f"sequence {self.index} has the token {int(tokens.min())}; tokens count from 0")
        steps = {layer: self._finished_steps(layer, count) for layer in self._geometries}
        self._take_gradients(gradients, gradient_steps, output_gradients or {}, count)
        with writing(self._trace.path):
            self._write_tokens(tokens, positions.detach().cpu().to(torch.int64), text)
            for layer, geometry in self._geometries.items():
                self._write_layer(geometry, count, steps[layer], (output_samples or {}).get(layer))
            self._trace.settle(sequence_path(self.index))
            write_durably(self._trace.root / WRITING / f"{self.index:04d}.whole", b"")
        self.finished = True

    def _take_gradients(
        self, gradients: Gradients | None, steps: Tensor | None, arrays: Mapping[int, Tensor], count: int
    ) -> None:
        """Hold gradients against what was drawn; what is stored of them waits in `_gradients`."""
        self._gradients: dict[int, tuple[Tensor, Tensor]] = {}
        if len({gradients is None, steps is None, not arrays}) != 1:
            raise KvtoolError("internal", "gradients, gradient_steps and output_gradients come together or not at all")
        if gradients is None or steps is None:
            return
        steps = steps.detach().to(device="cpu", dtype=torch.int64, copy=True)
        for layer, array in arrays.items():
            geometry = self._geometries[layer]
            dims = f"{gradients.draws} {geometry.query_heads} Tg {geometry.value_dim}"
            expect_shapes(gradient_steps=(steps, "Tg"), output_gradients=(array, dims))
            self._gradients[layer] = steps, stored_gradients(array, self._trace.dtype, f"layer {layer}", steps)
        fault = targets_fault(gradients, count, self._prompt_length)
        fault = fault or gradient_steps_fault(gradients, steps, count, self._prompt_length)
        if fault is not None:
            raise KvtoolError("shape", f"sequence {self.index} has {fault}")
        self._attributes = {**self._attributes, "gradients": gradient_attributes(gradients)}

    def _finished_steps(self, layer: int, count: int) -> Tensor:
        """The layer's query steps [Tq], after everything it appended was found to fit."""
        geometry = self._geometries[layer]
        steps = torch.cat([torch.empty(0, dtype=torch.int64), *self._steps[layer]])
        fault = steps_fault(steps, count)
        if fault is not None:
            raise KvtoolError("shape", f"layer {layer} has {fault}")
        for name in ("keys", "values"):
            rows = self._spools[layer, name].rows
            if rows != (count if geometry.kv_source is None else 0):
                raise KvtoolError("shape", f"layer {layer} has {rows} {name} for {count} tokens")
        projection = self._trace.projection_shape(layer)
        if projection is not None and projection[:2] != (geometry.query_heads, geometry.value_dim):
            raise KvtoolError(
                "shape",
                f"the output projection of layer {layer} has shape {list(projection)}, expected "
                f"[{geometry.query_heads}, {geometry.value_dim}, M]",
            )
        donor = None if geometry.kv_source is None else self._geometries.get(geometry.kv_source)
        if geometry.kv_source is not None:
            if donor is None or donor.kv_source is not None:
                raise KvtoolError(
                    "shape", f"layer {layer} reads the keys of layer {geometry.kv_source}, which stores none"
                )
            shared = (donor.kv_heads, donor.key_dim, donor.value_dim)
            if shared != (geometry.kv_heads, geometry.key_dim, geometry.value_dim):
                raise KvtoolError("shape", f"layer {layer} and its donor {donor.layer} differ in KV heads or channels")
        return steps

    def _write_tokens(self, tokens: Tensor, positions: Tensor, text: Sequence[bytes] | None) -> None:
        trace, path, count = self._trace, sequence_path(self.index), len(tokens)
        prompt = tokens[: self._prompt_length].numpy().astype("<i4").tobytes()
        attributes = {
            "prompt_digest": hashlib.sha256(prompt).hexdigest(),
            **self._attributes,
            "length": count,
            "prompt_length": self._prompt_length,
        }
        create_group(trace.root, path, {ATTRIBUTE: attributes})
        create_group(trace.root, f"{path}/layers", {})
        write_array(trace.root, f"{path}/tokens", tokens, archive=trace.archive)
        write_array(trace.root, f"{path}/positions", positions, archive=trace.archive)
        if text is not None:
            if len(text) != count:
                raise KvtoolError("shape", f"{len(text)} pieces of text for {count} tokens")
            ends = torch.tensor([0, *map(len, text)], dtype=torch.int64).cumsum(0)
            raw = torch.frombuffer(bytearray(b"".join(text)) or bytearray(1), dtype=torch.uint8)[: int(ends[-1])]
            write_array(trace.root, f"{path}/text", raw, archive=trace.archive)
            write_array(trace.root, f"{path}/text_offsets", ends, archive=trace.archive)

    def _write_layer(self, geometry: Geometry, count: int, steps: Tensor, sample: Tensor | None) -> None:
        trace, path = self._trace, layer_path(self.index, geometry.layer)
        rotated = self._keys_rotated.get(geometry.layer, True)
        create_group(trace.root, path, {ATTRIBUTE: layer_attributes(geometry, rotated)})
        for name, rows, heads, width in (
            ("queries", len(steps), geometry.query_heads, geometry.key_dim),
            ("keys", count, geometry.kv_heads, geometry.key_dim),
            ("values", count, geometry.kv_heads, geometry.value_dim),
        ):
            if name != "queries" and geometry.kv_source is not None:
                continue
            spool = self._spools[geometry.layer, name]
            empty, logical = to_numpy(torch.empty(0, dtype=trace.dtype))
            write_heads(
                trace.root,
                f"{path}/{name}",
                (heads, rows, width),
                str(empty.dtype),
                logical,
                spool.head,
                archive=trace.archive,
            )
            spool.remove()
        for name, tensor in self._small_arrays(geometry, steps, sample):
            write_array(trace.root, f"{path}/{name}", tensor, archive=trace.archive)

        if geometry.layer in self._gradients:
            of_steps, array = self._gradients.pop(geometry.layer)
            write_array(trace.root, f"{path}/gradient_steps", of_steps, archive=trace.archive)
            write_array(trace.root, f"{path}/output_gradients", array, archive=trace.archive)

    def _small_arrays(self, geometry: Geometry, steps: Tensor, sample: Tensor | None) -> Iterator[tuple[str, Tensor]]:
        yield "query_steps", steps
        if geometry.sink_logits is not None:
            expect_shapes(sink_logits=(geometry.sink_logits, str(geometry.query_heads)))
            if not bool(torch.isfinite(geometry.sink_logits).all()):
                raise KvtoolError("not-finite", f"the sink logits of layer {geometry.layer} hold NaN or infinity")
            yield "sink_logits", geometry.sink_logits.detach().to(torch.float32)
        rotation = geometry.rotation
        if rotation is not None and not isinstance(rotation, str) and rotation.cos is not None:
            yield "rotation_cos", rotation.cos.detach().to(torch.float32)
            if rotation.sin is not None:
                yield "rotation_sin", rotation.sin.detach().to(torch.float32)
        if sample is not None:
            expect_shapes(output_sample=(sample, f"{geometry.query_heads} n {geometry.value_dim}"))
            if sample.shape[1] > len(steps):
                raise KvtoolError(
                    "shape", f"layer {geometry.layer} has {sample.shape[1]} outputs, {len(steps)} queries"
                )
            yield "output_sample", sample.detach().to(torch.float32)
