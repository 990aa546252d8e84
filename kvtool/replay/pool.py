"""Pool: units done by several processes of this machine.

Not concurrent.futures: one killed process breaks its whole pool, and multiprocessing runs the caller's main module
again. Here a process is started by its own command, so that it needs no guard there, has one OpenMP thread from its
first moment, stands outside the terminal's group (Ctrl-C reaches this process alone, which then stops the others), and
sees the end of a pipe when this process dies in whatever way.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

from kvtool.errors import KvtoolError
from kvtool.replay.order import Order, Unit
from kvtool.replay.parts import Store
from kvtool.scratch import Scratch

TRIES = 3  # of one unit whose process dies
_START = (
    "import json, sys\n"
    "sys.path[:] = json.loads(sys.argv[2])\n"
    "from kvtool.replay.worker import serve\n"
    "serve(int(sys.argv[1]), sys.argv[3])\n"
)


class RemoteTraceback(Exception):
    """The traceback of another process, shown as the cause of what is raised here."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@dataclass(eq=False)
class _Worker:
    process: subprocess.Popen[bytes]
    connection: Connection
    unit: Unit | None = None
    ready: bool = False

    @property
    def ending(self) -> str:
        """How the process ended, in words."""
        code = self.process.wait()
        if code >= 0:
            return f"exited with {code}"
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}"
        return f"was killed by signal {-code}"


class Pool:
    """Processes that do the units of one order.

    Args:
        count: of processes, at least 1.
        store: the parts, opened by this process.
        note: told in a sentence of every process that was lost.
    """

    def __init__(self, order: Order, count: int, store: Store, note: Callable[[str], None]) -> None:
        self._order, self._count, self._store, self._note = order, count, store, note
        self._workers: list[_Worker] = []
        self._scratch = ""

    def run(self, units: list[Unit], done: Callable[[Unit], None], say: Callable[[Unit, str], None]) -> None:
        """Do all units. Their order of completion is any; the error that is raised is that of the first in `units`.

        Args:
            done: told of every unit whose part is written; say: of what a unit is doing.

        Raises:
            KvtoolError: what a unit raises, as it would without workers; `worker-lost` naming the unit whose process
                died `TRIES` times. Parts that are finished stay.
        """
        if not units:
            return
        with Scratch("workers") as folder:
            self._scratch = str(folder)
            try:
                self._run(units, done, say)
            finally:
                self._stop()

    def _run(self, units: list[Unit], done: Callable[[Unit], None], say: Callable[[Unit, str], None]) -> None:
        place = {unit: index for index, unit in enumerate(units)}
        todo, tries, unborn = deque(units), dict.fromkeys(units, 0), 0
        failed: dict[Unit, BaseException] = {}
        for _ in range(min(self._count, len(units))):
            self._start()
        left = len(units)
        while left:
            first = min((place[unit] for unit in failed), default=left + len(units))
            # Units are handed out in order, so whatever stands before a failed one is done or being done: waiting for
            # that makes the error the one that a single process would have met.
            owed = [unit for unit in (*(w.unit for w in self._workers), *todo) if unit is not None]
            if failed and not any(place[unit] < first for unit in owed):
                raise failed[units[first]]
            for worker in self._workers:
                if worker.ready and worker.unit is None and todo and place[todo[0]] < first:
                    worker.unit = todo.popleft()
                    with contextlib.suppress(OSError):  # it has just died, which the next lines find
                        worker.connection.send(worker.unit)
            for connection in wait([worker.connection for worker in self._workers]):
                (worker,) = (one for one in self._workers if one.connection is connection)
                try:
                    kind, what = worker.connection.recv()
                except (EOFError, OSError):
                    unborn = 0 if worker.ready else unborn + 1
                    self._replace(worker, todo, tries, failed, unborn)
                    continue
                unit = worker.unit
                if kind == "ready":
                    worker.ready, unborn = True, 0
                elif kind == "say" and unit is not None:
                    say(unit, what)
                elif kind == "done" and unit is not None:
                    worker.unit, left = None, left - 1
                    done(unit)
                elif unit is None:  # it cannot even begin, and no other will
                    raise _raised(kind, what)
                else:
                    worker.unit, failed[unit] = None, _raised(kind, what)

    def _replace(
        self,
        worker: _Worker,
        todo: deque[Unit],
        tries: dict[Unit, int],
        failed: dict[Unit, BaseException],
        unborn: int,
    ) -> None:
        """Another process for one that died, and its unit to be done again."""
        unit, ending = worker.unit, worker.ending
        self._end(worker)
        if unit is None:
            if unborn >= TRIES:
                raise KvtoolError(
                    "worker-lost", f"{unborn} workers died before they could begin, the last one {ending}", _MEMORY
                )
            self._start()
            return
        tries[unit] += 1
        if tries[unit] >= TRIES:
            failed[unit] = KvtoolError(
                "worker-lost",
                f"{unit}: the worker that computed it died {TRIES} times, the last one {ending}",
                f"{_MEMORY}; what is finished is kept with -o, and the same command goes on from there",
            )
        else:
            self._note(f"a worker {ending} at {unit}: it is computed again ({tries[unit]} of {TRIES - 1} more tries)")
            todo.appendleft(unit)
        self._start()

    def _start(self) -> None:
        mine, its = Pipe()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TMPDIR": self._scratch}
        path = json.dumps([entry for entry in sys.path if isinstance(entry, str)])
        try:
            process = subprocess.Popen(
                # -u: what is printed is there at once, since a worker may be killed
                [sys.executable, "-u", "-c", _START, str(its.fileno()), path, self._scratch],
                stdin=subprocess.DEVNULL,
                stdout=_stderr(),  # what a policy prints is no answer
                stderr=_stderr(),
                pass_fds=[its.fileno()],
                env=environment,
                process_group=0,
            )
        except OSError as error:
            mine.close()
            raise KvtoolError("worker-lost", f"no process can be started: {error.strerror}", _MEMORY) from error
        finally:
            its.close()
        worker = _Worker(process, mine)
        self._workers.append(worker)
        with contextlib.suppress(OSError):
            mine.send(self._order)

    def _end(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        worker.connection.close()
        self._store.sweep(worker.process.pid)

    def _stop(self) -> None:
        for worker in self._workers:
            worker.process.kill()
        for worker in list(self._workers):
            worker.process.wait()
            self._end(worker)


_MEMORY = "the system kills processes when memory runs out: try fewer --workers"


def _stderr() -> int:
    """Where the processes print; nowhere, if this one has no standard error."""
    try:
        os.fstat(2)
    except OSError:
        return subprocess.DEVNULL
    return 2


def _raised(kind: str, what: Any) -> BaseException:
    """What a worker met, as an exception of this process."""
    if kind == "error":
        return KvtoolError(*what)
    sentence, text = what
    error = RuntimeError(sentence)
    error.__cause__ = RemoteTraceback(text)
    return error
