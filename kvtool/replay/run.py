"""Replay: every unit of work (sequence, layer) with all its cells, then the means over them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from fractions import Fraction
from pathlib import Path

from kvtool.decomposition.settings import asked_for
from kvtool.errors import KvtoolError
from kvtool.manifest import digest
from kvtool.metrics import in_sequence
from kvtool.replay.attribution import attribute
from kvtool.replay.cards import noted
from kvtool.replay.coverage import Coverages
from kvtool.replay.decomposable import decomposable, stated_cost
from kvtool.replay.gather import Work, gather
from kvtool.replay.parts import Part, Store
from kvtool.replay.plan import Plan, make_plan
from kvtool.replay.unit import run_unit
from kvtool.replay.work import servable, unequal_starts, work_of
from kvtool.result import Result
from kvtool.trace import Trace, open_trace

# Stopped by these, a run may go on where it was; by any other error it would stop there again.
RESUMABLE = ("disk-full", "write-failed")
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
        progress: told (units done, all, what is being done).
        note: told in a sentence what a decomposition will cost, before it runs, and what ran on a card.

    Raises:
        KvtoolError: bad input of any kind, before anything is written.
    """
    plan = make_plan(
        policies,
        ratios=ratios,
        budgets=budgets,
        schedules=schedules,
        evict_at=evict_at,
        sinks=sinks,
        window=window,
        prefix=prefix,
        deadline_ms=deadline_ms,
        telemetry=telemetry,
        bin_steps=bin_steps,
        evaluate=evaluate,
        precision=precision,
        kl_windows=kl_windows,
        token_shares=token_shares,
        decompose=asked_for(decompose, center=center, horizon=horizon, samples=samples, pool=pool, keep=keep),
        metrics=metrics,
        device=device,
    )
    store = Store(Path(output), force) if output is not None else None
    opened = trace if isinstance(trace, Trace) else open_trace(trace)
    work = work_of(opened, plan, layers, sequences)
    plan, warnings = servable(plan, work, optional="all" in policies)
    warnings = warnings + unequal_starts(plan, work)
    covered = _covered(opened, plan, work)
    if plan.decompose is not None:
        warnings = warnings + decomposable(plan, work)
        if note is not None:
            note(stated_cost(plan, work))
    if store is None:
        return noted(_measure(opened, plan, work, None, progress, warnings, covered), note)
    store.open(plan.identity(opened))
    try:
        result = noted(_measure(opened, plan, work, store, progress, warnings, covered), note)
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
    return _measure(trace, plan, work, None, None, [], _covered(trace, plan, work))


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


def _measure(
    trace: Trace,
    plan: Plan,
    work: Work,
    store: Store | None,
    progress: Progress | None,
    warnings: list[str],
    covered: Coverages,
) -> Result:
    parts = _run(trace, plan, work, store, progress)
    result = gather(trace, plan, work, parts, warnings, covered)
    if plan.token_shares:
        result.tables["token_shares"] = attribute(plan, work, parts, progress)
    return result


def _run(trace: Trace, plan: Plan, work: Work, store: Store | None, progress: Progress | None) -> list[Part]:
    """The part of every unit, taken from the store where it was finished before."""
    common = plan.identity(trace)
    parts = []
    for done, (sequence, layer_id, step) in enumerate(work):
        where = f"sequence {sequence.index} layer {layer_id}"
        if progress is not None:
            progress(done, len(work), where)
        name, key = f"{sequence.index:04d}-{layer_id:03d}", digest({**common, "unit": [sequence.index, layer_id]})
        part = store.load(name, key) if store else None
        if part is None:
            with in_sequence(sequence.index):
                part = run_unit(sequence, layer_id, plan, step, _within(progress, done, len(work), where))
            if store:
                store.save(name, key, part)
        parts.append(part)
    return parts


def _within(progress: Progress | None, done: int, total: int, where: str) -> Callable[[str], None]:
    """What a long unit says while it runs."""

    def say(what: str) -> None:
        if progress is not None:
            progress(done, total, f"{where}: {what}")

    return say
