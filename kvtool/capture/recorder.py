"""The recorder: every attention call of a run, appended to the trace as it happens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from kvtool.capture.hook import AttentionCall
from kvtool.capture.kept_outputs import KeptOutputs
from kvtool.capture.module_inputs import position_embeddings_of
from kvtool.capture.probe import Probed
from kvtool.capture.request import QuerySelection
from kvtool.capture.rotation import received_tables
from kvtool.capture.rotation_watch import RotationWatch
from kvtool.capture.visibility import check_mask
from kvtool.errors import KvtoolError
from kvtool.layer import Geometry

SAMPLE_STEPS = 8


class Sink(Protocol):
    """What takes the arrays: a sequence of a trace being written."""

    def append(
        self,
        layer: int,
        *,
        keys: Tensor | None = None,
        values: Tensor | None = None,
        queries: Tensor | None = None,
        query_steps: Tensor | None = None,
    ) -> None: ...


@dataclass
class _Tail:
    """The newest rows of a [heads, n, width] array and their steps: at most `count` are kept."""

    count: int
    steps: Tensor
    rows: Tensor | None = None

    def push(self, rows: Tensor, steps: Tensor) -> None:
        rows, steps = rows[:, -self.count :], steps[-self.count :]
        joined = rows if self.rows is None else torch.cat([self.rows, rows], 1)
        self.rows = joined[:, -self.count :].clone()
        self.steps = torch.cat([self.steps, steps])[-self.count :]


def _tail(count: int) -> _Tail:
    return _Tail(count, torch.empty(0, dtype=torch.int64))


class Recorder:
    """Observer of one sequence's run.

    Only the newest n columns of the keys and values of a call are its own: the others came from
    the cache, which on windowed layers holds no more than the window.

    Args:
        model: whose run it is.
        probed: the layers to record, by id.
        prompt_length: rows of the prompt.
        selection: which queries are stored.
        tokens: T where it is known beforehand; while generating it is not.
        sink: see Sink.
        kept: half-open range of steps, perhaps to the end, whose attention outputs are kept in the run's dtype:
            as much memory as one draw of their gradients. None keeps nothing.
    """

    def __init__(
        self,
        model: nn.Module,
        probed: dict[int, Probed],
        prompt_length: int,
        selection: QuerySelection,
        tokens: int | None,
        sink: Sink,
        kept: tuple[int, int | None] | None = None,
    ) -> None:
        self._probed, self._sink = probed, sink
        self._first = 0
        self._held: dict[int, _Tail] = {}
        if selection.kind == "last" and tokens is None:
            # Which queries are the last is known only at the end: hold N of them.
            self._held = {layer: _tail(selection.count) for layer in probed}
        elif selection.kind != "all":
            self._first = selection.first_step(prompt_length, tokens or 0)
        self.ran = {} if kept is None else {layer: KeptOutputs(kept) for layer in probed}
        self._samples = {layer: _tail(SAMPLE_STEPS) for layer in probed}
        self._start = 0
        self._seen: set[int] = set()
        self._checked: dict[tuple[Any, ...], Any] = {}
        self._watches = {
            key: RotationWatch(entry.geometry.rotation, model, entry.sine_first)
            for entry in reversed(probed.values())
            if (key := entry.tables_key) is not None and not isinstance(entry.geometry.rotation, str | None)
        }

    def wants(self, layer: int) -> bool:
        return layer in self._probed

    def see(self, call: AttentionCall) -> None:
        geometry, n = self._probed[call.layer].geometry, call.queries.shape[1]
        if call.layer in self._seen:
            raise KvtoolError("model-unsupported", f"layer {call.layer} called its attention twice in one forward")
        self._seen.add(call.layer)
        self._check(geometry, call)
        steps = torch.arange(self._start, self._start + n)
        if geometry.kv_source is None:
            self._sink.append(call.layer, keys=call.keys[:, -n:], values=call.values[:, -n:])
        if self._held:
            self._held[call.layer].push(call.queries, steps)
        elif (skip := max(self._first - self._start, 0)) < n:
            self._sink.append(call.layer, queries=call.queries[:, skip:], query_steps=steps[skip:])
        if self.ran:
            self.ran[call.layer].push(call.output, self._start)
        self._samples[call.layer].push(call.output.transpose(0, 1).to(torch.float32), steps)

    def _check(self, geometry: Geometry, call: AttentionCall) -> None:
        """Hold the mask against the geometry, once a forward for each mask and kind of window."""
        # The mask itself is kept until the forward ends: the id of a freed one is given out again.
        key = (id(call.mask_object), geometry.kind, geometry.window, call.keys.shape[1])
        if key not in self._checked:
            check_mask(geometry, call, self._start)
            self._checked[key] = call.mask_object

    @contextmanager
    def forward(self, tokens: int) -> Iterator[None]:
        """Around one forward of `tokens` new rows: every layer must call exactly once."""
        self._seen.clear()
        self._checked.clear()
        for watch in self._watches.values():
            watch.begin(self._start, tokens)
        yield
        if self._seen != set(self._probed):
            missing = sorted(set(self._probed) - self._seen)
            raise KvtoolError("model-unsupported", f"layers {missing} were not called in a forward of this run")
        self._start += tokens

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While open, cos and sin that the layers receive are held against their rotation."""
        handles = []
        for key, watch in self._watches.items():
            module = next(entry.module for entry in self._probed.values() if entry.tables_key == key)

            def look(
                parent: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], watch: RotationWatch = watch
            ) -> None:
                watch.see(received_tables(position_embeddings_of(parent, args, kwargs)), _dtype(parent))

            handles.append(module.register_forward_pre_hook(look, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def samples(self) -> dict[int, Tensor]:
        """Attention output [H, n, Dv] float32 of the last n stored query steps, by layer."""
        found = {}
        for layer, tail in self._samples.items():
            assert tail.rows is not None
            stored = self._held[layer].count if self._held else self._start - self._first
            found[layer] = tail.rows[:, -min(stored, SAMPLE_STEPS) :]
        return found

    def finish(self) -> dict[int, Geometry]:
        """Append queries that were held back; returns the geometries with the rotation of this run."""
        for layer, tail in self._held.items():
            self._sink.append(layer, queries=tail.rows, query_steps=tail.steps)
        final = {}
        for layer, entry in self._probed.items():
            geometry = entry.geometry
            if entry.tables_key in self._watches and not isinstance(geometry.rotation, str | None):
                geometry = replace(geometry, rotation=self._watches[entry.tables_key].outcome())
            final[layer] = geometry
        return final


def _dtype(module: nn.Module) -> torch.dtype:
    return next(module.parameters()).dtype
