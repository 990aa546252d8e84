"""Order: a run written down so that another process does its units exactly as this one would.

A worker is told what the user typed and where that lies, builds the plan anew, and compares its identity with the
asker's. It writes a unit's part itself and answers with the part's name only: tables cross no pipe, and what a worker
has finished outlives it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtool import plugins
from kvtool.errors import KvtoolError
from kvtool.files import named_elsewhere
from kvtool.manifest import digest
from kvtool.metrics import in_sequence
from kvtool.registry import split_spec
from kvtool.replay.parts import Store
from kvtool.replay.plan import Plan, make_plan
from kvtool.replay.unit import run_unit
from kvtool.trace import Trace, open_trace


@dataclass(frozen=True)
class Unit:
    """One unit of work.

    Attributes:
        sequence, layer: what is replayed.
        step: the first evaluated one.
        name, key: of its part.
    """

    sequence: int
    layer: int
    step: int
    name: str
    key: str

    def __str__(self) -> str:
        return f"sequence {self.sequence} layer {self.layer}"


@dataclass(frozen=True)
class Order:
    """What every unit of a run has in common.

    Attributes:
        trace: absolute path or address.
        trace_digest: what opening it must find.
        asked: arguments of `make_plan`, as typed; `device` is what was found here, not `auto`, which may mean another
            thing to a worker.
        labels: the policies that the trace can serve.
        places: path as typed -> absolute path, of policies, metrics and calibration traces.
        output: absolute path of the folder that holds the parts.
        identity: digest of all that decides what a part holds.
        plugins: whether names may lead to other packages.
        online: whether addresses may be fetched.
    """

    trace: str
    trace_digest: str
    asked: dict[str, Any]
    labels: tuple[str, ...]
    places: dict[str, str]
    output: str
    identity: str
    plugins: bool = True
    online: bool = False

    @classmethod
    def of(cls, trace: Trace, plan: Plan, asked: dict[str, Any], output: Path, online: bool = False) -> Order:
        """The order that gives `plan`, which was made of the arguments `asked`."""
        return cls(
            trace=trace.address,
            trace_digest=trace.digest,
            asked={**asked, "device": "cpu" if plan.card is None else plan.card.kind},
            labels=tuple(label for label, _ in plan.policies),
            places=_places(plan),
            output=str(output.absolute()),
            identity=digest(plan.identity(trace)),
            plugins=not plugins.disabled(),
            online=online,
        )


def _plan_of(order: Order) -> Plan:
    """The plan as this process makes it.

    Raises:
        KvtoolError: what `make_plan` raises; `worker-differs` where the card is not here.
    """
    try:
        return make_plan(**order.asked)
    except KvtoolError as error:
        if error.code != "device":
            raise
        raise KvtoolError(
            "worker-differs", f"a worker on {os.uname().nodename} lacks the card: {error.message}", error.hint
        ) from error


def _places(plan: Plan) -> dict[str, str]:
    heads = [split_spec(label).name for label, _ in plan.policies]
    heads += [split_spec(metric.label, "metric").name for metric in plan.asked]
    files = [head.partition(".py:")[0] + ".py" for head in heads if ".py:" in head]
    names = [name for name in plan.calibrations if "://" not in name]
    return {typed: str(Path(typed).absolute()) for typed in [*files, *names]}


class Bench:
    """Where a worker does the units of one order, one after another."""

    def __init__(self, order: Order) -> None:
        """Raises: KvtoolError, `worker-differs` and what opening the trace and making the plan raise."""
        with plugins.switched_off(not order.plugins), named_elsewhere(order.places):
            trace = open_trace(order.trace, online=order.online)
            if trace.digest != order.trace_digest:
                raise KvtoolError(
                    "worker-differs",
                    f"{order.trace} is another trace for a worker than here",
                    "the trace must lie under the same path for every worker, and stay as it is during a run",
                )
            plan = _plan_of(order)
        plan = plan.only([one for one in plan.policies if one[0] in order.labels])
        if digest(plan.identity(trace)) != order.identity:
            raise KvtoolError(
                "worker-differs",
                "a worker makes another plan of the same words: its versions or files of policies or metrics differ",
                "install the same versions everywhere, and leave the files of policies and metrics alone during a run",
            )
        self._order, self._trace, self._plan = order, trace, plan
        self._store = Store.of_worker(Path(order.output), order.identity)

    def do(self, unit: Unit, say: Callable[[str], None] = lambda what: None) -> str:
        """Write the part of a unit, if it is not there yet; returns the part's name.

        Raises:
            KvtoolError: what measuring raises, `worker-differs` where the run's folder is gone, `disk-full`,
                `write-failed`.
        """
        self._store.expect_run()
        if self._store.load(unit.name, unit.key) is None:
            (sequence,) = (one for one in self._trace.sequences if one.index == unit.sequence)
            with plugins.switched_off(not self._order.plugins), in_sequence(unit.sequence):
                part = run_unit(sequence, unit.layer, self._plan, unit.step, say)
            self._store.expect_run()
            self._store.save(unit.name, unit.key, part)
        return unit.name


_benches: list[tuple[Order, Bench]] = []  # the last one
_one_at_a_time = threading.Lock()


def do_unit(order: Order, unit: Unit) -> tuple[str, Any]:
    """`Bench.do` for processes that are handed units by others: ("done", name) or ("error", (code, message, hint)).

    A process does one unit at a time, however many threads ask: that is what the stated memory counts with.
    """
    import torch

    with _one_at_a_time:
        torch.set_num_threads(1)
        try:
            if not _benches or _benches[0][0] != order:
                _benches[:] = [(order, Bench(order))]
            return "done", _benches[0][1].do(unit)
        except KvtoolError as error:
            return "error", (error.code, error.message, error.hint)
