"""View: what a policy may see at an event. It ends there: nothing at or after `step` is in reach."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvtool.errors import KvtoolError
from kvtool.layer import Geometry, Layer
from kvtool.rotation import Rotation


@dataclass(frozen=True, eq=False)
class Future:
    """What only an oracle sees: the whole layer and the steps that will be evaluated."""

    layer: Layer
    steps: Tensor  # [F] int64, every one >= the event, each with a stored query


@dataclass(frozen=True, eq=False)
class View:
    """The causal view of one layer just before query `step`.

    The same class serves `Policy.observe` and `Policy.score`. For `score`, `tokens` are the
    candidates of the event. For `observe`, they are all tokens that were live at some step of
    start..step-1, and `evict_step` says which of those steps saw them.

    Attributes:
        layer: the layer; private to the view, read it through the view's own members.
        step: e, the event: queries and tokens of rows < e are visible.
        tokens: [Hk, N] int64 row indices, ascending in each KV head.
        start: first step not yet observed.
        evict_step: [Hk, N] int64, step at which the token left (T = never).
        steps_ahead: evaluated steps, present only for oracles.
        memo: by-products of `score` that `diagnose` reads at the same event; empty at first.
        shared: what kvtool's own policies found out about an untouched cache, for the others on the same layer.
    """

    _layer: Layer
    step: int
    tokens: Tensor
    start: int
    evict_step: Tensor
    steps_ahead: Tensor | None = None
    memo: dict[Any, Any] = field(default_factory=dict, repr=False)
    shared: dict[Any, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def at(cls, layer: Layer, step: int, steps_ahead: Tensor | None = None) -> View:
        """The view of an untouched cache before query `step`: every visible token is a candidate."""
        first = int(layer.geometry.first_visible(torch.tensor(step)))
        tokens = torch.arange(first, step).expand(layer.geometry.kv_heads, -1)
        return cls(layer, step, tokens, step, torch.full_like(tokens, layer.tokens), steps_ahead)

    def past(self) -> View:
        """What `observe` sees of all steps before the event, on a cache from which nothing was evicted."""
        rows = torch.arange(self.step).expand(self.geometry.kv_heads, -1)
        never = torch.full_like(rows, self._layer.tokens)
        return View(self._layer, self.step, rows, 0, never, self.steps_ahead)

    @property
    def geometry(self) -> Geometry:
        return self._layer.geometry

    @property
    def dtype(self) -> torch.dtype:
        """float32 or float64: what scores are computed in."""
        return self._layer.dtype

    def _rows(self, array: Tensor) -> Tensor:
        """`array` [Hk, T, D] at `tokens`; a slice where the tokens are one run, the usual case."""
        if self.tokens.shape[1] == 0:
            return array[:, :0]
        first, last = int(self.tokens[0, 0]), int(self.tokens[0, -1])
        run = torch.arange(first, last + 1)
        if run.numel() == self.tokens.shape[1] and bool((self.tokens == run).all()):
            return array[:, first : last + 1]
        return torch.gather(array, 1, self.tokens[:, :, None].expand(-1, -1, array.shape[2]))

    @cached_property
    def keys(self) -> Tensor:
        """[Hk, N, D], as cached (rotated)."""
        return self._rows(self._layer.keys)

    @cached_property
    def values(self) -> Tensor:
        """[Hk, N, Dv]."""
        return self._rows(self._layer.values)

    @property
    def output_projection(self) -> Tensor:
        """[H, Dv, M], weights of the model: the same at every step.

        Raises:
            KvtoolError: code `trace-lacks`.
        """
        projection = self._layer.output_projection
        if projection is None:
            raise KvtoolError(
                "trace-lacks",
                f"layer {self.geometry.layer} has no output projection in this trace",
                "capture without --no-output-projection, or choose a policy that needs none",
            )
        return projection

    def positions(self, rows: Tensor) -> Tensor:
        """Rotary positions of `rows` (any shape), all before the event."""
        self._refuse_future(int(rows.max()) + 1 if rows.numel() else 0)
        if rows.numel() and int(rows.min()) < 0:
            raise KvtoolError("policy-broken", f"the policy asked for row {int(rows.min())}: rows count from 0")
        return self._layer.positions[rows]

    def next_positions(self, count: int) -> Tensor:
        """[count] positions that follow the newest token, as the model would number them."""
        return self._layer.positions[self.step - 1] + 1 + torch.arange(count)

    def queries(self, start: int, stop: int) -> Tensor:
        """[H, stop - start, D], rotated queries of steps start..stop-1.

        Raises:
            KvtoolError: code `trace-lacks` when some were not captured.
        """
        self._refuse_future(stop)
        return self._layer.queries[:, self._layer.query_rows(start, stop)]

    @property
    def rotation(self) -> Rotation | None:
        """The layer's rotation, None for a layer without one.

        Raises:
            KvtoolError: code `trace-lacks` where the trace does not say.
        """
        rotation = self.geometry.rotation
        if rotation is None:
            raise KvtoolError(
                "trace-lacks",
                f"layer {self.geometry.layer} does not say how its queries were rotated",
                "capture with kvtool, or give `rotation` in the dump's metadata",
            )
        return rotation if isinstance(rotation, Rotation) else None

    def unrotated_queries(self, start: int, stop: int) -> Tensor:
        """[H, stop - start, D], queries before the rotary embedding (after any QK-norm)."""
        queries, rotation, rows = self.queries(start, stop), self.rotation, torch.arange(start, stop)
        return queries if rotation is None else rotation.unrotate(queries, self._layer.positions[rows], rows)

    def unrotated_by_head(self, start: int, stop: int) -> Iterator[Tensor]:
        """The same as [stop - start, D] of one query head after another: a long layer's at once double its memory."""
        queries, rotation, rows = self.queries(start, stop), self.rotation, torch.arange(start, stop)
        if rotation is None:
            return iter(queries)
        return rotation.unrotate_each(queries, self._layer.positions[rows], rows)

    def gradients(self, count: int) -> Tensor:
        """[S, H, n, Dv], gradients of the newest n <= `count` steps before the event that have any: what the
        model's predictions at steps before the event say of attention's output (see `Layer.output_gradients`).

        Raises:
            KvtoolError: code `trace-lacks` where there are none, or where they know targets at or after the event.
        """
        lacking = gradients_missing(self._layer, self.step)
        if lacking is not None:
            raise KvtoolError("trace-lacks", *lacking)
        steps, stored = self._layer.gradient_steps, self._layer.output_gradients
        assert steps is not None
        assert stored is not None
        stop = int(torch.searchsorted(steps, last_drawn(self._layer, self.step)))
        return stored[:, :, max(0, stop - count) : stop]

    def information(self, calibration: str) -> Tensor:
        """[H, Dv, Dv] float64, the mean of g g^T over another trace's gradients (see Layer.information)."""
        return self._layer.information(calibration)

    def stream(self, seed: int, head: int) -> np.random.Generator:
        """The random stream of (seed, prompt, layer, head, event): the same in any order of work."""
        key = f"{seed}/{self._layer.prompt_digest}/{self.geometry.layer}/{head}/{self.step}"
        words = np.frombuffer(hashlib.sha256(key.encode()).digest(), dtype="<u4")
        return np.random.Generator(np.random.PCG64(np.random.SeedSequence(words.tolist())))

    @property
    def future(self) -> Future:
        """The future, for policies that declare `oracle = True`."""
        if self.steps_ahead is None:
            raise KvtoolError(
                "policy-broken",
                "the policy reads the future but does not declare oracle = True",
            )
        return Future(self._layer, self.steps_ahead)

    def _refuse_future(self, stop: int) -> None:
        if stop > self.step:
            raise KvtoolError(
                "policy-broken",
                f"the policy asked for row {stop - 1} at an event before row {self.step}: a view ends at its event",
            )


def last_drawn(layer: Layer, step: int) -> int:
    """The step behind the last one before `step` whose gradient can differ from 0: its own block has a target."""
    return step if layer.gradients is None else min(step, layer.gradients.targets[1])


def gradients_missing(layer: Layer, step: int) -> tuple[str, str] | None:
    """Why the gradients of steps before `step` cannot be shown at an event there, and what to do; None if they can.

    A gradient knows every target of its own block from its step on. Where one of these is the event's
    step or a later one, rows after the event have shaped it.
    """
    where, how = f"layer {layer.geometry.layer}", "capture with --gradients 4 --gradients-at prompt"
    if layer.gradients is None or layer.gradient_steps is None or not layer.has("output_gradients"):
        return f"{where} has no gradients in this trace", how
    steps, (low, high) = layer.gradient_steps, layer.gradients.targets
    first, before = int(steps[0]), steps[steps < last_drawn(layer, step)]
    if before.numel() == 0 or low >= step:
        return f"{where} has no gradient of a step before the event at step {step}", how
    newest = int(before[-1])
    block_end = first + ((newest - first) // layer.gradients.block + 1) * layer.gradients.block
    if min(block_end, high, int(steps[-1]) + 1) > step:
        return (
            f"the gradients of {where} know targets at or after the event at step {step}, which is the future there",
            f"{how}, or with a --gradient-block that ends at the event",
        )
    return None
