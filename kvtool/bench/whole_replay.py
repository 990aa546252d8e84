"""Whole-replay rows: the command as people run it, in a process of its own."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from kvtool.bench.counted_replay import PROGRAM
from kvtool.bench.goals import Measured
from kvtool.bench.made_trace import write_trace
from kvtool.bench.situation import Situation
from kvtool.bench.timing import OutOfTime

POLICIES = (
    *("streaming-llm", "knorm", "keydiff", "tova", "h2o", "observed-attention"),
    *("snapkv", "r-kv", "lagkv", "expected-attention", "capkv", "jacap"),
)
RATIOS = "0.5,0.7,0.8,0.9,0.95"


def replay_arguments(trace: Path) -> list[str]:
    """`kvtool replay` on one thread, with all policies of this comparison."""
    policies = [word for name in POLICIES for word in ("-p", name)]
    return ["--no-plugins", "replay", str(trace), *policies, "-r", RATIOS]


def subject(here: Situation) -> Path:
    """The trace that is replayed: the user's, or one that is made once per bench."""
    if here.trace is not None:
        return here.trace
    path = here.scratch / "made.zarr"
    return path if path.exists() else write_trace(path)


def finished(command: list[str], here: Situation) -> float:
    """Wall-clock seconds of a process that must succeed.

    Raises:
        OutOfTime: it was stopped when the time of the bench was over.
        RuntimeError: it failed, with the last of what it said.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "COLUMNS": "160"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    begun = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, *command],
            env=environment,
            capture_output=True,
            text=True,
            timeout=max(1.0, here.watch.left),
        )
    except subprocess.TimeoutExpired:
        raise OutOfTime from None
    if done.returncode:
        raise RuntimeError(f"kvtool replay ended with {done.returncode}: {done.stderr.strip()[-300:]}")
    return time.monotonic() - begun


def overhead(here: Situation) -> dict[str, Measured]:
    """The share of a replay's CPU seconds that neither the operations nor the policies' scores account for."""
    counts = here.scratch / "counts.json"
    trace = subject(here)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    try:
        finished(["-c", PROGRAM, str(counts), *replay_arguments(trace), "--threads", "1"], here)
    except RuntimeError as error:
        return {"replay_overhead": Measured.without(str(error))}
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    found = json.loads(counts.read_text())
    return {"replay_overhead": share_outside(total, found["inside"], found["imports"], after.ru_maxrss)}


def share_outside(total: float, inside: dict[str, float], imports: float, peak_kib: int) -> Measured:
    """One run's share, with the parts in CPU seconds."""
    rest = total - sum(inside.values())
    parts = {**inside, "imports": imports, "elsewhere": rest - imports, "total": total}
    detail: dict[str, Any] = {"seconds": parts, "largest_process_bytes": peak_kib * 1024}
    return Measured(rest / total, (rest / total, rest / total), 1, detail=detail)
