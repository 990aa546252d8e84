"""Loop: one sequence through the real model, once with its whole cache and once for every cell."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvtool.capture.generation import Feed
from kvtool.capture.hook import observed
from kvtool.capture.rotation_watch import RotaryState
from kvtool.errors import KvtoolError
from kvtool.kernels.retained_attention.reference import CellBlock
from kvtool.live.deciding import Deciding
from kvtool.live.evicted import Evicted, Watched, Whole
from kvtool.live.measures import Predictions, compare
from kvtool.live.model import LiveModel
from kvtool.live.recording import Recording
from kvtool.metrics.output_error import LayerError, OutputError
from kvtool.metrics.step_errors import measure
from kvtool.replay.plan import Cell, Plan
from kvtool.retained import RetainedSet
from kvtool.trace import Sequence
from kvtool.trace.recompute import dtypes, error_bound

# How far the keys of the same model may be from the stored ones, in bounds of one attention: rounding goes through
# many layers. SmolLM2 in bfloat16 is 0.011 away from its float32 trace (bound 0.05).
_KEY_ROOM = 5.0


@dataclass(frozen=True, eq=False)
class LayerErrors:
    """Closed-loop errors of one layer: its output under eviction, in every layer below too, against the full run's.

    Attributes:
        output_error: [H] float64, relative, NaN where the full output is zero.
        layer_error: after the output projection; NaN without one.
    """

    output_error: Tensor
    layer_error: float


@dataclass(frozen=True, eq=False)
class Outcome:
    """What one cell did to one sequence.

    Attributes:
        predictions: from the event to the last row (and an appended answer).
        layers: closed-loop errors by layer; empty unless asked for.
        generated: tokens of the model's own continuation; empty unless asked for.
    """

    predictions: Predictions
    layers: dict[int, LayerErrors] = field(default_factory=dict)
    generated: list[int] = field(default_factory=list)


class Loop:
    """One sequence, its rows before the event in the model's cache.

    Args:
        ready: the model.
        sequence: whose tokens are run.
        event: step before whose query tokens are evicted; rows before it are run plainly.
        appended: tokens fed behind the sequence.
        layer_errors: collect attention outputs.
        chunk: most tokens of one forward.
        recording: of what the model computes, for runs that decide for themselves.

    Attributes:
        key_error: largest relative distance of a layer's keys from the stored ones.
    """

    def __init__(
        self,
        ready: LiveModel,
        sequence: Sequence,
        event: int,
        appended: tuple[int, ...] = (),
        layer_errors: bool = False,
        chunk: int | None = None,
        recording: Recording | None = None,
    ) -> None:
        self._recording = recording
        self._ready, self._sequence, self._event = ready, sequence, event
        self._geometries = {layer: entry.geometry for layer, entry in ready.probed.items()}
        self._layer_errors = layer_errors
        tokens = sequence.tokens.tolist()
        prefill = Whole(self._geometries, recording=recording)
        self._feed = Feed(ready.model, chunk=chunk, later=ready.later, around=prefill.forward)
        with observed(ready.model, prefill):
            self._first = self._feed.push(tokens[:event])  # [V]
        self.key_error = self._check_keys(prefill, range(event))
        prefill.keys.clear()  # the feed keeps its observer
        self._rotary = RotaryState(ready.model)
        self._run = tokens[event:] + list(appended)
        watched = Whole(self._geometries, event, layer_errors)
        self._full = self._logits(watched)  # [n, V]
        self.key_error = max(self.key_error, self._check_keys(watched, range(event, sequence.length)))
        self._outputs = {layer: watched.output(layer) for layer in sequence.layer_ids} if layer_errors else {}

    def _check_keys(self, run: Whole, rows: range) -> float:
        """The model must compute the keys that the trace holds of `rows`: else decisions and cache have nothing in
        common, or the trace's queries and this run are of different texts."""
        bound = _KEY_ROOM * error_bound(*dtypes(self._sequence.trace))
        if self._ready.dtype != torch.float32:
            bound = max(bound, _KEY_ROOM * error_bound(str(self._ready.dtype).removeprefix("torch."), "float32"))
        worst = 0.0
        for layer in self._sequence.layer_ids:
            stored = self._sequence.layer(layer).keys[:, rows.start : rows.stop]
            found = torch.cat(run.keys[layer], 1)[:, : len(rows)].to(torch.float32)
            error = float((found - stored).norm() / stored.norm().clamp_min(torch.finfo(torch.float32).tiny))
            if not error <= bound:
                raise KvtoolError(
                    "model-differs",
                    f"the keys of layer {layer} that this model computes for rows {rows.start}:{rows.stop} are "
                    f"{error:.2g} away from those of sequence {self._sequence.index} (bound {bound:g})",
                    "give the model that was captured, in the dtype of its run",
                )
            worst = max(worst, error)
        return worst

    def _logits(self, watched: Watched) -> Tensor:
        self._rotary.restore()
        branch = self._feed.fork(around=watched.forward)
        with observed(self._ready.model, watched):
            if not isinstance(watched, Deciding):
                return branch.logits(self._run)
            found, at, end = [], self._event, self._event + len(self._run)
            while at < end:
                stop = min(watched.decide() or end, end)
                found.append(branch.logits(self._run[at - self._event : stop - self._event]))
                at = stop
            return torch.cat(found)

    def evict(self, retained: dict[int, RetainedSet]) -> Outcome:
        """Run the sequence's own continuation with these tokens hidden, and compare with the full run."""
        watched = Evicted(self._geometries, retained, self._event, self._layer_errors)
        return self._outcome(self._logits(watched), watched, retained)

    def decide(self, cell: Cell, plan: Plan, layers: dict[int, int]) -> tuple[Outcome, dict[int, RetainedSet]]:
        """The same where the run decides for itself; also what it decided.

        Args:
            layers: that evict, by id -> the layer whose cache they read.
        """
        assert self._recording is not None, "nothing was recorded of the rows before the first event"
        self._recording.rewind(self._event)
        watched = Deciding(self._geometries, layers, cell, plan, self._recording, self._event, self._layer_errors)
        logits = self._logits(watched)
        return self._outcome(logits, watched, watched.retained), watched.retained

    def _outcome(self, logits: Tensor, watched: Watched, retained: dict[int, RetainedSet]) -> Outcome:
        errors = {}
        if self._layer_errors:
            errors = {layer: self._errors(layer, watched.output(layer), kept) for layer, kept in retained.items()}
        return Outcome(compare(self._full, logits, torch.tensor(self._run[1:])), errors)

    def _errors(self, layer: int, evicted: Tensor, retained: RetainedSet) -> LayerErrors:
        steps = torch.arange(self._event, self._sequence.length)
        count = steps.numel()
        full, evicted = self._outputs[layer][:, :count], evicted[:, :count]
        unknown = torch.full(full.shape[:2], torch.nan)
        block = CellBlock(0, slice(0, count), full, evicted, full - evicted, unknown, unknown)
        projection = self._ready.probed[layer].output_projection()
        (found,) = measure(
            [block], steps, 1, projection=None if projection is None else projection.to(torch.float32), layer=layer
        )
        geometry = self._geometries[layer]
        return LayerErrors(
            OutputError().partial(found, geometry, retained)["output_error"],
            float(LayerError().partial(found, geometry, retained)["layer_error"]),
        )

    def generate(self, retained: dict[int, RetainedSet], count: int, stop: frozenset[int]) -> list[int]:
        """At most `count` tokens of the model's own greedy continuation with these tokens hidden.

        The first is picked by the step before the event, and so is the same in every cell.
        """
        self._rotary.restore()
        watched = Evicted(self._geometries, retained, self._event)
        branch = self._feed.fork(around=watched.forward)
        token = int(self._first.argmax())
        tokens = [token]
        with observed(self._ready.model, watched):
            while len(tokens) < count and token not in stop:
                token = int(branch.push([token]).argmax())
                tokens.append(token)
        return tokens
