"""Run: measure what was asked for, group by group, within the time there is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtool.bench import attention, decoding, on_trace, scoring, storage, whole_replay, workers
from kvtool.bench import device as card
from kvtool.bench.goals import GOALS, Goal, Measured, entry
from kvtool.bench.situation import Situation, load_before, usable_cores
from kvtool.bench.timing import OutOfTime, Stopwatch, one_thread
from kvtool.errors import KvtoolError
from kvtool.manifest import environment
from kvtool.registry import did_you_mean
from kvtool.scratch import Scratch

SCHEMA = "kvtool.bench/1"
SECONDS = 540.0
LEAST_SECONDS = 1.0
Progress = Callable[[int, int, str], None]
Measure = Callable[[Situation], dict[str, Measured]]

# Goals that one measurement answers together. Whatever needs an idle machine comes first: later it is busy with this.
# What cannot be cut short comes last: on a slow machine it would leave no time for the rest.
GROUPS: tuple[tuple[tuple[str, ...], Measure], ...] = (
    (("workers",), workers.two_workers),
    (
        (
            "output_errors_8k",
            "output_errors_8k_layer",
            "output_errors_8k_kl",
            "against_masked_sdpa",
            "against_gathered_sdpa",
        ),
        attention.at_8k,
    ),
    (("output_errors_32k",), attention.at_32k),
    (("against_gathered_sdpa_20_ratios",), attention.many_ratios),
    (
        (
            "leverage_against_solving",
            "leverage_against_two_gemms",
            "leverage_against_solving_float64",
            "leverage_against_two_gemms_float64",
        ),
        scoring.leverage,
    ),
    (("greedy_against_refactorising",), scoring.greedy_against),
    (("exhaustive_seconds", "exhaustive_against_loop"), scoring.exhaustive),
    (("decode_against_steps", "decode_50_cells"), decoding.at_8k),
    (("head_read",), storage.head_read),
    (("replay_overhead",), whole_replay.overhead),
)
SCRIPTED = {"kvpress": "its own script prints it: tests/peers/kvpress_replay.py, in an environment with kvpress 0.5.5"}
LEFT_OUT = "left out by --only"
OUT_OF_TIME = "the time of the bench was over: give it more with --budget, or ask for less with --only"


@dataclass(frozen=True)
class Bench:
    """What one bench found.

    Attributes:
        goals: one entry per goal, as in the JSON document.
        manifest: the machine, the versions, and what was asked.
    """

    goals: list[dict[str, Any]]
    manifest: dict[str, Any]

    def document(self) -> dict[str, Any]:
        """The JSON document."""
        return {"schema": SCHEMA, "manifest": self.manifest, "goals": self.goals}


def bench(
    trace: str | Path | None = None,
    *,
    only: Iterable[str] = (),
    device: str = "cpu",
    budget: float = SECONDS,
    progress: Progress | None = None,
) -> Bench:
    """Measure kvtool against plain torch and against floors, as ratios. Whether goals are met is no error.

    Prints nothing. Computes on one thread; the comparison's code runs in the same process, in turn with kvtool's.

    Args:
        trace: attention and scoring are measured on its own layers as well, and it is what whole replays replay.
        only: names of goals; none is all.
        device: `cpu`, or `cuda` for the kernels on this machine's card.
        budget: wall-clock seconds in all; what would take longer is left out, and says so.
        progress: told (goals done, all, what is measured).

    Raises:
        KvtoolError: `usage`; `file-missing`, `trace-not` and their like for the trace; `internal` where two sides
            of a comparison found different numbers.
    """
    goals = {"cpu": GOALS, "cuda": card.GOALS}.get(device)
    if goals is None:
        raise KvtoolError("usage", f"--device {device} is unknown", did_you_mean(device, ["cpu", "cuda"]))
    names = [goal.name for goal in goals]
    wanted = list(dict.fromkeys(only))
    for name in wanted:
        if name not in names:
            raise KvtoolError("usage", f"--only {name} is no goal of the bench", did_you_mean(name, names))
    if not budget >= LEAST_SECONDS:
        raise KvtoolError("usage", f"--budget {budget:g} is no time", f"give at least {LEAST_SECONDS:g} second")
    if device == "cuda":
        card.refuse_without_card()
    watch, load = Stopwatch(budget), load_before()
    layers = None if trace is None else on_trace.Opened.of(trace)
    with Scratch("bench") as folder, one_thread():
        here = Situation(
            watch,
            frozenset(wanted or names),
            folder,
            None if trace is None else Path(trace),
            load,
            usable_cores(),
        )
        groups = GROUPS if device == "cpu" else card.GROUPS
        found = _measured(here, groups, progress)
        lines = [entry(goal, found.get(goal.name) or _missing(goal, here)) for goal in goals]
        if layers is not None and device == "cpu" and not wanted:
            lines += layers.entries(here)
    manifest = {
        **environment("triton"),
        "device": device,
        "cores": here.cores,
        "load_before": load,
        "budget_seconds": budget,
        "seconds": budget - watch.left,
        "only": wanted,
        "trace": None if layers is None else layers.describe(),
    }
    return Bench(lines, manifest)


def _measured(
    here: Situation, groups: tuple[tuple[tuple[str, ...], Measure], ...], progress: Progress | None
) -> dict[str, Measured]:
    asked = [(names, measure) for names, measure in groups if here.wants(*names)]
    found: dict[str, Measured] = {}
    for done, (names, measure) in enumerate(asked):
        mine = [name for name in names if name in here.wanted]
        if progress is not None:
            progress(done, len(asked), ", ".join(mine))
        try:
            answer = measure(here)
        except OutOfTime:
            answer = {}
        found |= {name: answer.get(name) or Measured.without(OUT_OF_TIME) for name in mine}
    return found


def _missing(goal: Goal, here: Situation) -> Measured:
    return Measured.without(SCRIPTED.get(goal.name, LEFT_OUT) if goal.name in here.wanted else LEFT_OUT)
