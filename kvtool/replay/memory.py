"""Memory: what a replay's processes will take at most, said before they start.

The numbers are of resident memory. They are what the arrays take by their shapes, and two allowances, of a process and
of its tiles, that were chosen so that every peak that was measured (docs/scaling.md) lies below the sum; it was up to a
half too large, which leaves room for policies of others.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from kvtool.errors import KvtoolError
from kvtool.layer import Geometry
from kvtool.replay.plan import Plan
from kvtool.trace import Sequence

Work = list[tuple[Sequence, int, int]]  # (sequence, layer id, first evaluated step)
PROCESS_BYTES = 330 << 20  # Python, torch and the other packages
SCRATCH_BYTES = 160 << 20  # tiles of logits and sums, whatever the length
SCRATCH_PER_TOKEN = 4 << 10  # columns of such tiles
DECISION_BYTES = 28  # per cell, KV head and row: its step twice, its row, its place in a ranking, its table
ERROR_BYTES = 48  # per cell, query head and evaluated step: five numbers in float64, and one on the way
GB = 1e9


@dataclass(frozen=True)
class Machine:
    """Memory here, in bytes; of the control group where that allows less.

    Attributes:
        total: what there is.
        available: what is not in use, as the kernel estimates it.
    """

    total: int
    available: int

    @classmethod
    def here(cls) -> Machine:
        """This machine, now."""
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        found = re.search(r"MemAvailable:\s+(\d+) kB", _text("/proc/meminfo"))
        available = int(found[1]) * 1024 if found else total
        limit, used = _text("/sys/fs/cgroup/memory.max").strip(), _text("/sys/fs/cgroup/memory.current").strip()
        if limit.isdigit():
            total = min(total, int(limit))
            available = min(available, max(0, int(limit) - (int(used) if used.isdigit() else 0)))
        return cls(total, available)


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def unit_bytes(sequence: Sequence, layer_id: int, plan: Plan, step: int) -> int:
    """The most resident memory of a process that does one unit, in bytes."""
    geometry = sequence.parsed[layer_id][0]
    source = geometry.kv_source
    number = plan.dtype.itemsize
    arrays = _arrays(sequence, layer_id, geometry) + (0 if source is None else _arrays(sequence, source, geometry))
    arrays *= number + (8 if plan.decompose is not None else 0)  # decomposing reads the layer again, in float64
    cells, tokens, rows = len(plan.cells), sequence.length, sequence.length - step
    decisions = cells * geometry.kv_heads * tokens * DECISION_BYTES
    errors = cells * geometry.query_heads * rows * ERROR_BYTES
    return PROCESS_BYTES + arrays + decisions + errors + SCRATCH_BYTES + tokens * SCRATCH_PER_TOKEN


def _arrays(sequence: Sequence, layer_id: int, geometry: Geometry) -> int:
    """Numbers in the arrays of a layer, those of another whose keys and values it reads included."""
    tokens = sequence.length
    count = geometry.kv_heads * tokens * (geometry.key_dim + geometry.value_dim)
    for name in ("queries", "output_projection", "output_gradients"):
        if sequence.has_array(name, layer_id):
            size = 1
            for extent in sequence.shape(name, layer_id):
                size *= extent
            count += size
    return count


def gathered_bytes(plan: Plan, work: Work) -> int:
    """What this process holds when it puts all parts together: mostly the step at which every row was evicted."""
    rows = sum(sequence.parsed[layer_id][0].kv_heads * sequence.length for sequence, layer_id, _ in work)
    return PROCESS_BYTES + 2 * 4 * len(plan.cells) * rows


def stated_memory(plan: Plan, work: Work, workers: int, machine: Machine | None = None) -> str:
    """A sentence about what the run will take.

    Args:
        workers: on this machine, 0 for a cluster's elsewhere.
        machine: None is this one.

    Raises:
        KvtoolError: code `memory` for more than this machine has, naming the number of workers that fit.
    """
    each, sequence, layer_id = max((unit_bytes(s, layer, plan, step), s.index, layer) for s, layer, step in work)
    here = gathered_bytes(plan, work)
    largest = f"sequence {sequence} layer {layer_id}"
    if not workers:
        return f"a worker needs up to {each / GB:.1f} GB ({largest}), this process {here / GB:.1f} GB at the end"
    machine = machine or Machine.here()
    count = min(workers, len(work))
    need = max(count * each, here)  # the workers are gone when the parts are put together
    said = f"{count} workers need up to {count * each / GB:.1f} GB ({each / GB:.1f} GB each, {largest})"
    if count == 1:
        said = f"1 worker needs up to {each / GB:.1f} GB ({largest})"
    said += f", this process {here / GB:.1f} GB at the end"
    hint = "replay fewer policies or ratios at a time"
    if (fitting := machine.total // each) and here <= machine.total:
        hint = f"--workers {fitting} fits"
    if need > machine.total:
        raise KvtoolError("memory", f"{said}, and this machine has {machine.total / GB:.1f} GB", hint)
    if need > machine.available:
        fitting = max(1, machine.available // each)
        return f"{said}: only {machine.available / GB:.1f} GB are free now, and --workers {fitting} would take less"
    return f"{said}; {machine.available / GB:.1f} GB are free"
