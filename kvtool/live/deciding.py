"""Deciding: an evicted run that decides for itself, from what it has computed so far."""

from __future__ import annotations

from collections.abc import Iterator

from kvtool.allocator import Uniform
from kvtool.layer import Geometry
from kvtool.live.evicted import Evicted, leaving
from kvtool.live.recording import Recording
from kvtool.replay.choose import First
from kvtool.replay.decide import Track
from kvtool.replay.plan import Cell, Plan
from kvtool.retained import RetainedSet


class Deciding(Evicted):
    """Hides what a policy evicts, event after event: each sees the queries, keys and values of this very run, in
    which whatever was evicted before is missing already.

    Args:
        layers: that evict, by id -> the layer whose cache they read.
        recording: of this run, its rows before `start` filled; it is filled further.
        start: rows that the cache already holds, the step of the first event at most.
    """

    def __init__(
        self,
        geometries: dict[int, Geometry],
        layers: dict[int, int],
        cell: Cell,
        plan: Plan,
        recording: Recording,
        start: int,
        outputs: bool = False,
    ) -> None:
        super().__init__(geometries, {}, start, outputs, recording)
        self._sources, rules = layers, plan.rules(cell.schedule)
        # Nothing is shared between tracks: an event elsewhere may have changed what this layer computes.
        self._tracks = {
            donor: Track(layer, cell.label, cell.policy, cell.budget, rules, layer.query_steps, Uniform(), First())
            for donor, layer in recording.layers.items()
        }
        self._events: dict[int, Iterator[int]] = {donor: track.events() for donor, track in self._tracks.items()}
        self._due = {donor: next(events, None) for donor, events in self._events.items()}
        self._hide()

    def decide(self) -> int | None:
        """Run every event that is due before the next row; the step of the next event, None where none comes."""
        acted = False
        for donor, due in self._due.items():
            assert due is None or due >= self._start, "an event was passed over"
            if due == self._start:
                # The next one is asked for, which runs this one; no layer has two before the same query.
                self._due[donor], acted = next(self._events[donor], None), True
        if acted:
            self._hide()
        return min((due for due in self._due.values() if due is not None), default=None)

    def _hide(self) -> None:
        self._leaves = {layer: leaving(retained) for layer, retained in self.retained.items()}

    @property
    def retained(self) -> dict[int, RetainedSet]:
        """What was decided so far, by layer; who reads another's cache inherits its decisions."""
        found = {donor: track.retained for donor, track in self._tracks.items()}
        return {layer: found[donor] for layer, donor in self._sources.items()}
