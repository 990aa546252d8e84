"""Evicted: the observers of a live run. They hold masks against geometries, and hide what was evicted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvtool.capture.hook import AttentionCall
from kvtool.capture.visibility import check_mask
from kvtool.errors import KvtoolError
from kvtool.layer import Geometry
from kvtool.live.recording import Recording
from kvtool.retained import RetainedSet

NEVER = torch.iinfo(torch.int32).max


class Watched:
    """Observer of every attention layer of a model over one run of a sequence.

    Args:
        geometries: all attention layers of the model, by id.
        start: rows that the cache already holds.
        outputs: keep the attention outputs.
        recording: told queries, keys and values.
    """

    def __init__(
        self,
        geometries: dict[int, Geometry],
        start: int = 0,
        outputs: bool = False,
        recording: Recording | None = None,
    ) -> None:
        self._geometries, self._start = geometries, start
        self._keep, self._recording = outputs, recording
        self._outputs: dict[int, list[Tensor]] = {layer: [] for layer in geometries}
        self._seen: set[int] = set()
        self._checked: set[tuple[Any, ...]] = set()

    def wants(self, layer: int) -> bool:
        return layer in self._geometries

    def see(self, call: AttentionCall) -> None:
        geometry = self._geometries[call.layer]
        self._seen.add(call.layer)
        key = (id(call.mask), geometry.kind, geometry.window, call.keys.shape[1])
        if key not in self._checked:
            check_mask(geometry, call, self._start)
            self._checked.add(key)
        if self._keep:
            self._outputs[call.layer].append(call.output.to(torch.float32))
        if self._recording is not None:
            self._recording.see(call, self._start)

    @contextmanager
    def forward(self, tokens: int) -> Iterator[None]:
        """Around one forward of `tokens` new rows: every layer must call."""
        self._seen.clear()
        self._checked.clear()
        yield
        missing = sorted(set(self._geometries) - self._seen)
        if missing:
            raise KvtoolError("model-unsupported", f"layers {missing} were not called in a forward of this run")
        self._start += tokens

    def output(self, layer: int) -> Tensor:
        """[H, n, Dv] float32 attention outputs of all rows since the start."""
        return torch.cat(self._outputs[layer]).transpose(0, 1)


class Whole(Watched):
    """A run with the whole cache: remembers the keys [Hk, n, D] that the model computes, by layer, a forward each."""

    def __init__(
        self,
        geometries: dict[int, Geometry],
        start: int = 0,
        outputs: bool = False,
        recording: Recording | None = None,
    ) -> None:
        super().__init__(geometries, start, outputs, recording)
        self.keys: dict[int, list[Tensor]] = {layer: [] for layer in geometries}

    def see(self, call: AttentionCall) -> None:
        super().see(call)
        self.keys[call.layer].append(call.keys[:, -call.queries.shape[1] :].clone())


class Evicted(Watched):
    """Hides evicted tokens from every query at or after their eviction; the cache keeps them untouched.

    Args:
        retained: by layer; layers that are not named keep everything.
        start: rows that the cache already holds, the step of the first event at most.
    """

    def __init__(
        self,
        geometries: dict[int, Geometry],
        retained: dict[int, RetainedSet],
        start: int,
        outputs: bool = False,
        recording: Recording | None = None,
    ) -> None:
        super().__init__(geometries, start, outputs, recording)
        self._leaves = {layer: leaving(decided) for layer, decided in retained.items()}

    def hidden(self, layer: int, steps: int, columns: int) -> Tensor | None:
        """bool [H, n, Tk]: whether the token of the column has left when the step's query runs."""
        if layer not in self._leaves:
            return None
        stop = self._start + steps
        leaves = self._leaves[layer]
        # Rows behind the trace's last (a continuation of the model's own) are never evicted.
        leaves = pad(leaves, (0, max(stop - leaves.shape[1], 0)), value=NEVER)[:, stop - columns : stop]
        gone = leaves[:, None, :] <= torch.arange(self._start, stop)[None, :, None]  # [Hk, n, Tk]
        return gone.repeat_interleave(self._geometries[layer].group, 0)


def leaving(retained: RetainedSet) -> Tensor:
    """[Hk, T] int64 step at which each token leaves; tokens that never do leave at no step of any run."""
    steps = retained.evict_step.to(torch.int64)
    return steps.masked_fill(steps >= retained.tokens, NEVER)
