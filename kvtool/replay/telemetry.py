"""Telemetry: what an event costs on this machine. Only where it is asked for: times make no two results alike."""

from __future__ import annotations

import time
from collections.abc import Sequence as Many
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvtool.layer import Layer
from kvtool.retained import RetainedSet

STAGES = ("scoring", "factorisation", "selection", "compaction")


class TensorBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that operations make and that are still alive.

    Memory that an operation needs inside itself, and Python's own, is not seen. Slows small operations down.

    Attributes:
        peak: the most bytes alive at once, None where nobody counts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak: int | None = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    @classmethod
    @contextmanager
    def watched(cls, wanted: bool) -> Any:
        """Counts inside where `wanted`; a plain number holder otherwise."""
        counter = cls()
        if not wanted:
            counter.peak = None
            yield counter
            return
        with counter:
            yield counter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in known:  # a view, or an argument changed in place, is no new memory
                    self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        self.peak = max(self.peak or 0, sum(size for _, size in self._alive.values()))
        return made


def compact(layer: Layer, rows: Many[Tensor], keep: Many[Tensor]) -> float:
    """Seconds that it takes to copy what an event kept into new keys and values, as an engine with one dense cache
    would. Rows keep their logical positions: nothing is renumbered."""
    begun = time.perf_counter()
    for head, (mine, kept) in enumerate(zip(rows, keep, strict=True)):
        chosen = mine[kept]
        layer.keys[head].index_select(0, chosen)
        layer.values[head].index_select(0, chosen)
    return time.perf_counter() - begun


def telemetry_entries(key: dict[str, Any], retained: RetainedSet) -> list[dict[str, Any]]:
    """The table `telemetry` of one cell in one layer: one entry per event at which the policy was asked.

    The one table whose values differ from run to run. `eviction_ms` is the sum of the stages.
    """
    entries = []
    for event in retained.events:
        if not event.seconds:  # everything fitted, or the policy keeps all: there was nothing to time
            continue
        spent = {f"{name}_ms": 1000 * event.seconds.get(name, 0.0) for name in STAGES}
        entries.append(
            {
                **key,
                "event": event.step,
                "achieved": float(event.achieved.min()),
                **spent,
                "eviction_ms": sum(spent.values()),
                "peak_temporary_bytes": event.temporary_bytes,
            }
        )
    return entries
