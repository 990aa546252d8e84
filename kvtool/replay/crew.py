"""Crew: who does the units of a replay besides this process, and where their parts lie meanwhile."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvtool.errors import KvtoolError
from kvtool.replay.memory import stated_memory
from kvtool.replay.order import Order, Unit
from kvtool.replay.parts import Part, Store
from kvtool.replay.plan import Plan
from kvtool.replay.pool import Pool
from kvtool.scratch import Scratch
from kvtool.trace import Sequence, Trace

Progress = Callable[[int, int, str], None]
PATIENCE_S = 30  # until a part that a worker has written shows here: shared folders lag


@dataclass(frozen=True)
class Crew:
    """Processes of this machine, or of a cluster.

    Attributes:
        workers: processes of this machine, 0 for none.
        cluster: address of a Dask scheduler.
        note: told in a sentence what the user should know.
    """

    workers: int = 0
    cluster: str | None = None
    note: Callable[[str], None] = lambda sentence: None

    @classmethod
    def of(
        cls, workers: int | None, cluster: str | None, output: Any, note: Callable[[str], None] | None
    ) -> Crew | None:
        """The crew that was asked for; None where this process is to do everything itself.

        Raises:
            KvtoolError: `usage`; `package-missing` where a cluster needs one.
        """
        if workers is None and cluster is None:
            return None
        if workers is not None and cluster is not None:
            raise KvtoolError("usage", "--workers and --cluster were both given", "the cluster has workers of its own")
        if workers is not None and workers < 1:
            raise KvtoolError("usage", f"--workers {workers} is below 1")
        if cluster is not None:
            if output is None:
                raise KvtoolError(
                    "usage", "--cluster needs -o", "a folder that this machine and all workers see under one path"
                )
            from kvtool.replay.cluster import expect_distributed

            expect_distributed()
        return cls(workers or 0, cluster, note or (lambda sentence: None))

    def stated(self, plan: Plan, work: list[tuple[Sequence, int, int]]) -> None:
        """Say what memory the run will take, before it runs.

        Raises:
            KvtoolError: code `memory` where this machine does not have it.
        """
        self.note(stated_memory(plan, work, self.workers))

    def parts(
        self,
        trace: Trace,
        plan: Plan,
        asked: dict[str, Any],
        units: list[Unit],
        store: Store,
        progress: Progress | None,
        online: bool,
    ) -> list[Part]:
        """The part of every unit, those computed that `store` does not have yet."""
        store.announce()
        found = {unit: part for unit in units if (part := store.load(unit.name, unit.key)) is not None}
        left, total = [unit for unit in units if unit not in found], len(units)
        finished = len(found)

        def tell(what: str) -> None:
            if progress is not None:
                progress(finished, total, what)

        def done(unit: Unit) -> None:
            nonlocal finished
            finished += 1
            tell(str(unit))

        def say(unit: Unit, what: str) -> None:
            tell(f"{unit}: {what}")

        tell(f"{self.workers or 'cluster'} workers")
        order = Order.of(trace, plan, asked, store.output, online)
        if self.cluster is None:
            Pool(order, self.workers, store, self.note).run(left, done, say)
        else:
            from kvtool.replay.cluster import Cluster

            Cluster(order, self.cluster, store, self.note).run(left, done)
        return [found.get(unit) or _awaited(store, unit) for unit in units]


def _awaited(store: Store, unit: Unit) -> Part:
    """The part that a worker says it has written.

    Raises:
        KvtoolError: code `worker-differs` where it does not show up.
    """
    until = time.monotonic() + PATIENCE_S
    while (part := store.load(unit.name, unit.key)) is None:
        if not (store.folder / "run").exists() or time.monotonic() > until:
            raise KvtoolError(
                "worker-differs",
                f"the part of {unit} that a worker wrote does not show up in {store.folder}",
                "-o must be one folder that all workers see",
            )
        time.sleep(0.25)
    return part


@contextlib.contextmanager
def place_for(crew: Crew | None, output: Any, force: bool) -> Iterator[tuple[Store | None, bool]]:
    """The store of a run, and whether what it holds at the end is its result: without -o, parts of workers lie in a
    temporary folder."""
    if output is not None or crew is None:
        yield (None if output is None else Store(Path(output), force)), output is not None
        return
    with Scratch("replay") as folder:
        yield Store(folder / "parts-of-workers", force), False


@contextlib.contextmanager
def one_thread(crew: Crew | None) -> Iterator[None]:
    """One thread, as every worker has: then nothing tells how many workers there were."""
    if crew is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
