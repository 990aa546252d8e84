"""Live: one run of the closed loop, from checked options to the Result."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

from kvtool.errors import KvtoolError

if TYPE_CHECKING:
    from kvtool.result import Result
    from kvtool.trace import Trace

DECIDE = ("trace", "run")


def live(
    model: str | os.PathLike[str],
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
    decide: str = "trace",
    layers: Iterable[int] | None = None,
    sequences: Iterable[int] | None = None,
    precision: str = "float32",
    kl_windows: int | Many[int] = (),
    calibrate: bool = False,
    metrics: str | Many[str] = (),
    layer_errors: bool = False,
    generate: int = 0,
    answer: str | Many[str] = (),
    other_weights: bool = False,
    model_dtype: str | None = None,
    online: bool = False,
    chunk: int | None = None,
    output: str | Path | None = None,
    force: bool = False,
    progress: Callable[[int, int, str], None] | None = None,
    notes: Callable[[str], None] | None = None,
) -> Result:
    """Evict in the real model's cache what replay would evict, and measure what the model then says.

    Prints nothing. The controls `full` and `random` always run.

    Args:
        model: as for kvtool.capture; its weights must be those of the trace.
        policies, ratios, budgets, schedules, evict_at, sinks, window, prefix, layers, sequences, precision: as for
            kvtool.replay.
        decide: `trace`, what replay decides on the trace is carried out; `run`, every event is decided from the
            queries, keys and values that the evicted model has computed so far. Oracles decide from the trace always.
        calibrate: replay too, and hold its predictions against the measurement; `kl_windows` and `metrics` as for
            kvtool.replay.
        layer_errors: measure the attention outputs of every layer under eviction.
        generate: tokens of the model's own greedy continuation per cell, where there is one event.
        answer: a text or `LO:HI` rows whose likelihood is measured; one, or one per sequence.
        other_weights: admit weight files with another digest; the keys must agree all the same.
        model_dtype: of the run; by default the captured run's.
        chunk: most tokens of one forward.
        progress: called with (done, total, what); notes: with one sentence.

    Raises:
        KvtoolError: bad input of any kind, before anything is written; `model-differs`, `not-reproduced`.
    """
    from kvtool.capture.packages import require
    from kvtool.replay.parts import Store
    from kvtool.replay.plan import make_plan
    from kvtool.replay.work import servable, unequal_starts, work_of
    from kvtool.trace import Trace, open_trace

    require("transformers")
    answer = (answer,) if isinstance(answer, str) else tuple(answer)
    kl_windows = (kl_windows,) if isinstance(kl_windows, int) else tuple(kl_windows)
    for name, value in (("--generate", generate), ("--chunk", 1 if chunk is None else chunk)):
        if value < (0 if name == "--generate" else 1):
            raise KvtoolError("usage", f"{name} {value} is too small")
    if decide not in DECIDE:
        raise KvtoolError("usage", f"--decide {decide} is unknown", f"known: {', '.join(DECIDE)}")
    if kl_windows and not calibrate:
        raise KvtoolError("usage", "--kl-window widens a prediction, but none is made", "add --calibrate")
    if metrics and not calibrate:
        raise KvtoolError("usage", "--metric measures a replay, but none is made", "add --calibrate")
    plan = make_plan(
        policies,
        ratios=ratios,
        budgets=budgets,
        schedules=schedules,
        evict_at=evict_at,
        sinks=sinks,
        window=window,
        prefix=prefix,
        precision=precision,
        kl_windows=kl_windows,
        metrics=metrics,
    )
    moved = next((label for label, policy in plan.policies if policy.positions == "cache"), None)
    if moved is not None:
        raise KvtoolError(
            "usage",
            f"{moved} counts positions inside its cache, and the model is run with those of the text",
            "kvtool replay measures it; positions=original can be run live",
        )
    if generate and plan.repeats:
        raise KvtoolError(
            "usage",
            "--generate goes with one event: under a schedule of several, nothing decides about the model's own tokens",
            "leave --generate out, or evict once, at the end of the prompt or --evict-at",
        )
    store = Store(Path(output), force, resumes=False) if output is not None else None
    opened = trace if isinstance(trace, Trace) else open_trace(trace, online=online)
    work = work_of(opened, plan, layers, sequences)
    plan, warnings = servable(plan, work, optional="all" in policies)
    if apart := unequal_starts(plan, work):
        sentence = f"one live run measures all cells on the same steps, but {apart[0]}"
        raise KvtoolError("usage", sentence, "run one schedule at a time")

    from kvtool.capture.quiet import quiet
    from kvtool.live.closed_loop import ClosedLoop, Options

    options = Options(calibrate, layer_errors, generate, answer, other_weights, model_dtype, online, chunk, decide)
    if store is not None:
        store.open(plan.identity(opened))
    finished = False
    try:
        with quiet():
            loop = ClosedLoop(os.fspath(model), opened, plan, work, options, progress, notes)
            result = loop.run(warnings)
        if store is not None:
            result.save(store.output)
        finished = True
    finally:
        if store is not None:
            store.close(finished=finished)
    return result
