"""Replay: every unit of work (sequence, layer) with all its cells, then the means over them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from kvtool.decomposition.settings import asked_for
from kvtool.errors import KvtoolError
from kvtool.manifest import digest
from kvtool.metrics import in_sequence
from kvtool.replay.attribution import attribute
from kvtool.replay.cards import noted
from kvtool.replay.coverage import Coverages
from kvtool.replay.crew import Crew, one_thread, place_for
from kvtool.replay.decomposable import decomposable, stated_cost
from kvtool.replay.gather import Work, arrow_tables, gather
from kvtool.replay.order import Unit
from kvtool.replay.parts import Part, Store
from kvtool.replay.plan import Plan, make_plan
from kvtool.replay.unit import run_unit
from kvtool.replay.work import servable, unequal_starts, work_of
from kvtool.result import Result
from kvtool.trace import Sequence, Trace, open_trace

# Stopped by these, a run may go on where it was; by any other error it would stop there again.
RESUMABLE = ("disk-full", "write-failed", "worker-lost", "worker-differs", "cluster", "memory")
Progress = Callable[[int, int, str], None]


def replay(
    trace: str | Path | Trace,
    policies: str | Many[str] = ("all",),
    *,
    ratios: str | float | Fraction | Many[str | float | Fraction] = (),
    budgets: int | Many[int] = (),
    schedules: str | Many[str] = (),
    evict_at: int | None = None,
    sinks: int = 4,
    window: int = 32,
    prefix: int = 0,
    deadline_ms: float | None = None,
    telemetry: bool = False,
    bin_steps: int | None = None,
    layers: Iterable[int] | None = None,
    sequences: Iterable[int] | None = None,
    evaluate: str = "live",
    precision: str = "float32",
    kl_windows: int | Iterable[int] = (),
    token_shares: bool = False,
    decompose: bool = False,
    center: str = "rope_mean",
    horizon: int = 512,
    samples: int = 64,
    pool: int = 16,
    keep: int = 8,
    metrics: str | Many[str] = (),
    device: str = "auto",
    workers: int | None = None,
    cluster: str | None = None,
    online: bool = False,
    output: str | Path | None = None,
    force: bool = False,
    progress: Progress | None = None,
    note: Callable[[str], None] | None = None,
) -> Result:
    """Replay policies on a trace and measure what eviction does to attention's output.

    Prints nothing. The controls `full` and `random` always run. With `output`, finished units are
    kept there and a stopped run resumes; the folder is complete once it holds manifest.json.

    Args:
        policies: `name:key=value,…`, `file.py:Class:…`, or `all`.
        ratios: shares evicted; strings stay exact decimals. Or `budgets`, tokens kept per KV head.
        schedules: when eviction runs, as `every:64`, `high-water:512`, `prefill:128+every:64/after` (see
            kvtool.schedule.parse_schedule); several are compared. None is the end of each prompt.
        evict_at: step of a single event instead.
        sinks, window: protected first and newest tokens, the same for every policy; `prefix`: protected first rows,
            such as a system prompt.
        deadline_ms: an event that takes longer keeps the sliding window instead; such a result is not reproducible.
        telemetry: measure times and bytes of every event (table `telemetry`).
        bin_steps: evaluated steps per bin of the table `timeline`; None makes at most 32 bins.
        layers, sequences: ids to replay; None is all.
        kl_windows: steps in further windows of `predicted_kl`, besides 1 and 32.
        token_shares: also tell the predicted KL apart by evicted token, in a second pass (table `token_shares`).
        decompose: also tell selection, linearisation and dropped competition apart (tables `decomposition`, `ladder`).
        center: where policies without query statistics of their own are linearised: `rope_mean` (on layers without
            rotation `prompt`), `prompt`, `past` or `future`.
        horizon: most queries that are decomposed.
        samples, pool, keep: sub-caches per KV head for exact search, their tokens, and how many are kept; 0
            samples leave the search out.
        metrics: names of metrics besides the built-in ones, `name:key=value,…` of an installed package or
            `file.py:Class:…`; their columns stand in the tables of their level.
        device: `cuda`, the Triton kernels on a card, which work in float32 (docs/devices.md); `cpu`; or `auto`, a card
            where there is one.
        workers: processes of this machine that share the units, one thread each; None is this process alone.
        cluster: address of a Dask scheduler whose workers do them instead; needs `output` in a folder that all see.
        online: whether `trace` may be an address, such as s3://bucket/run.zarr.
        progress: told (units done, all, what is being done).
        note: told in a sentence what a decomposition will cost and workers will need, before they run, which
            worker was lost, and what ran on a card.

    Raises:
        KvtoolError: bad input of any kind, before anything is written.
    """
    crew = Crew.of(workers, cluster, output, note)
    asked: dict[str, Any] = {
        "policies": policies,
        "ratios": ratios,
        "budgets": budgets,
        "schedules": schedules,
        "evict_at": evict_at,
        "sinks": sinks,
        "window": window,
        "prefix": prefix,
        "deadline_ms": deadline_ms,
        "telemetry": telemetry,
        "bin_steps": bin_steps,
        "evaluate": evaluate,
        "precision": precision,
        "kl_windows": kl_windows if isinstance(kl_windows, int) else tuple(kl_windows),
        "token_shares": token_shares,
        "decompose": asked_for(decompose, center=center, horizon=horizon, samples=samples, pool=pool, keep=keep),
        "metrics": metrics,
        "device": device,
    }
    plan = make_plan(**asked)
    with place_for(crew, output, force) as (store, kept), one_thread(crew):
        opened = trace if isinstance(trace, Trace) else open_trace(trace, online=online)
        work = work_of(opened, plan, layers, sequences)
        plan, warnings = servable(plan, work, optional="all" in policies)
        warnings = warnings + unequal_starts(plan, work)
        covered = _covered(opened, plan, work)
        if plan.decompose is not None:
            warnings = warnings + decomposable(plan, work)
            if note is not None:
                note(stated_cost(plan, work))
        if crew is not None:
            crew.stated(plan, work)
        run = _Run(opened, plan, work, progress, crew, asked, online)
        if store is None:
            return noted(run.result(None, warnings, covered), note)
        store.open(plan.identity(opened))
        try:
            result = noted(run.result(store, warnings, covered), note)
            if kept:
                result.save(store.output)
        except KvtoolError as error:
            store.close(finished=False, resumable=error.code in RESUMABLE)
            raise
        except BaseException:
            store.close(finished=False)
            raise
        store.close(finished=True)
        return result


def replayed(trace: Trace, plan: Plan, work: Work) -> Result:
    """The result of a plan that is made and checked already; nothing is written.

    Raises:
        KvtoolError: as `replay`.
    """
    return _Run(trace, plan, work).result(None, [], _covered(trace, plan, work))


def _covered(trace: Trace, plan: Plan, work: Work) -> Coverages:
    """What the gradients of the sequences speak of.

    Raises:
        KvtoolError: `trace-lacks` where shares by token were asked for and no sequence has gradients that serve.
    """
    found = Coverages.of(trace, plan, work)
    reasons = [one.missing for one in found.first().values()]
    if plan.token_shares and all(reasons):
        raise KvtoolError("trace-lacks", f"--token-shares has nothing to share out: {reasons[0]}")
    return found


@dataclass(frozen=True, eq=False)
class _Run:
    """A replay whose every choice is made.

    Attributes:
        crew: who else does units; `asked`, the arguments that the plan was made of, and `online` are for it.
    """

    trace: Trace
    plan: Plan
    work: Work
    progress: Progress | None = None
    crew: Crew | None = None
    asked: dict[str, Any] = field(default_factory=dict)
    online: bool = False

    def result(self, store: Store | None, warnings: list[str], covered: Coverages) -> Result:
        """Every unit done and gathered."""
        parts = self._parts(store)
        result = gather(self.trace, self.plan, self.work, parts, warnings, covered)
        if self.plan.token_shares:
            result.tables["token_shares"] = attribute(self.plan, self.work, parts, self.progress)
        return result

    def _parts(self, store: Store | None) -> list[Part]:
        """The part of every unit, taken from the store where it was finished before."""
        common = self.plan.identity(self.trace)
        units = [
            Unit(
                sequence.index,
                layer_id,
                step,
                f"{sequence.index:04d}-{layer_id:03d}",
                digest({**common, "unit": [sequence.index, layer_id]}),
            )
            for sequence, layer_id, step in self.work
        ]
        if self.crew is not None and store is not None:
            return self.crew.parts(self.trace, self.plan, self.asked, units, store, self.progress, self.online)
        places = zip(units, self.work, strict=True)
        return [self._part(done, unit, sequence, store) for done, (unit, (sequence, _, _)) in enumerate(places)]

    def _part(self, done: int, unit: Unit, sequence: Sequence, store: Store | None) -> Part:
        def tell(where: str) -> None:
            if self.progress is not None:
                self.progress(done, len(self.work), where)

        tell(str(unit))
        part = store.load(unit.name, unit.key) if store else None
        if part is None:
            with in_sequence(unit.sequence):
                part = run_unit(sequence, unit.layer, self.plan, unit.step, lambda what: tell(f"{unit}: {what}"))
            part.tables = arrow_tables(part)  # entries take a hundred times the room, until all layers are there
            if store:
                store.save(unit.name, unit.key, part)
        return part
