"""Run: from a suite's file to what moved, and, on request, to a new baseline."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvtool.check.baseline import read_baseline, write_baseline
from kvtool.check.judge import Direction, Row, judge_job
from kvtool.check.observe import merged, observe
from kvtool.check.outcome import Check, JobOutcome
from kvtool.check.places import file_target, folders_of
from kvtool.check.prepare import Prepared, prepared, refuse_faulty_trace, refuse_other_traces, traces_of
from kvtool.check.suite import Job, Suite, read_suite
from kvtool.errors import KvtoolError
from kvtool.files import Lock, writing
from kvtool.replay import replay
from kvtool.result import Result
from kvtool.trace import Trace

Progress = Callable[[int, int, str], None]


def check(
    path: str | Path,
    *,
    update: bool = False,
    strict: bool = False,
    only: str | Iterable[str] = (),
    output: str | Path | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Check:
    """Replay what a suite lists and hold it against its baseline. Prints nothing.

    While a job runs, the working folder of the process is the suite's: policies in files and calibration traces are
    named relative to it, and the baseline, which holds those names, must not depend on the machine.

    Args:
        update: accept what is found: write the baseline, of the jobs that ran.
        strict: what the baseline lacks is a failure too.
        only: names of jobs; the others are left alone.
        output: folder where the result of each job is kept, in a folder of its own.
        force: replace results there; with `update` start from a baseline that cannot be read, or that is another
            suite's, as if there were none.
        progress: told (units done, all, what is being done) of each job.

    Raises:
        KvtoolError: `suite`, `trace-changed`, `baseline` and whatever opening a trace says, before anything runs;
            what a trace says that turns out to be damaged; `job-failed` where an update would lose a job.
    """
    suite = read_suite(path)
    jobs = suite.chosen([only] if isinstance(only, str) else only)
    folders = folders_of([job.name for job in jobs], None if output is None else Path(output).resolve(), force)
    with _held(suite.baseline, update):
        baseline, anew = _baseline(suite, update, force, bool(only))
        traces = traces_of(suite)
        if not update:
            refuse_other_traces(suite, jobs, baseline)
        ready = prepared(suite, traces)
        found: dict[str, dict[str, Any]] = {}
        outcomes = []
        for job in jobs:
            one, began = ready[job.name], time.monotonic()
            result = _result(suite, one, traces[job.trace], _told(progress, job))
            seconds = time.monotonic() - began
            if isinstance(result, KvtoolError):
                refuse_faulty_trace(job, result)
                outcomes.append(JobOutcome(job.name, job.trace, error=result, seconds=seconds))
                continue
            if job.name in folders:
                result.save(folders[job.name])
            found[job.name] = observe(job, one.columns, result)
            rows, notes = _judged(suite, one, baseline.get(job.name, {}), found[job.name])
            outcomes.append(JobOutcome(job.name, job.trace, rows, None, seconds, notes, tuple(result.warnings)))
        gone = [name for name in sorted(baseline) if name not in {job.name for job in suite.jobs}] if not only else []
        outcomes += [JobOutcome(name, None, gone=max(1, len(baseline[name]["cells"]))) for name in gone]
        whole = Check(suite.path, suite.baseline, tuple(outcomes), strict)
        return replace(_updated(whole, suite, baseline, found, gone), anew=anew) if update else whole


def _result(suite: Suite, one: Prepared, trace: Trace, progress: Progress | None) -> Result | KvtoolError:
    """What the job's replay says, or why it says nothing."""
    if one.fault is not None:
        return one.fault
    try:
        with contextlib.chdir(suite.folder):
            return replay(trace, one.job.policies, **one.job.options, metrics=one.metrics, progress=progress)
    except KvtoolError as error:
        return error


def _judged(
    suite: Suite, one: Prepared, then: Mapping[str, Any], now: Mapping[str, Any]
) -> tuple[tuple[Row, ...], tuple[str, ...]]:
    """The cells of a job held against the baseline, and notes on settings that differ."""
    # A metric that only the baseline knows is missing, whichever way is better.
    directions: dict[str, Direction] = {name: column.direction for name, column in one.columns.items()}
    rows = judge_job(then, now, suite.tolerance, lambda metric: directions.get(metric, "none"))
    return tuple(rows), tuple(_differing(then, now))


def _updated(
    whole: Check, suite: Suite, baseline: Mapping[str, Any], found: Mapping[str, Any], gone: list[str]
) -> Check:
    """Write the baseline.

    Raises:
        KvtoolError: code `job-failed` where a job did; the file is then as it was.
    """
    failed = [job for job in whole.jobs if job.error is not None]
    if failed:
        said = "; ".join(f"{job.name!r}: {job.error.message} [{job.error.code}]" for job in failed if job.error)
        raise KvtoolError(
            "job-failed",
            f"{suite.baseline} stays as it was, since not every job ran: {said}",
            "mend them, or update the others with --only JOB",
        )
    kept = {name: job for name, job in baseline.items() if name not in gone}
    kept |= {name: merged(baseline.get(name), new, suite.tolerance) for name, new in found.items()}
    changed = write_baseline(suite.baseline, kept, suite.file_name)
    return replace(whole, updated=changed, dropped=tuple(gone))


@contextlib.contextmanager
def _held(baseline: Path, update: bool) -> Iterator[None]:
    """Nobody else updates the same baseline in the meantime.

    Raises:
        KvtoolError: `file-missing` where its folder is not there, `usage` where it is no file, `locked`,
            `write-failed`.
    """
    if not baseline.parent.is_dir():
        raise KvtoolError("file-missing", f"{baseline.parent}, where the baseline belongs, is no folder")
    file_target(baseline, "the baseline")
    if not update:
        yield
        return
    try:
        with writing(baseline):
            lock = Lock(baseline)
    except KvtoolError as error:
        hint = "wait for the other update; a check without --update need not wait"
        raise KvtoolError(error.code, error.message, hint if error.code == "locked" else error.hint) from error
    try:
        yield
    finally:
        lock.release()


def _baseline(suite: Suite, update: bool, force: bool, some: bool) -> tuple[dict[str, dict[str, Any]], str | None]:
    """What the baseline says, and why an update starts without it, if it does.

    Args:
        some: only some jobs run.
    """
    again = f"kvtool check {suite.path} --update"
    way_out = f"bring it back from version control, or record everything anew with {again} --force"
    try:
        found = read_baseline(suite.baseline, suite.file_name, way_out)
    except KvtoolError as error:
        if not (update and force):
            raise
        if some:
            raise KvtoolError(error.code, f"{error.message}; --only leaves the other jobs out", way_out) from error
        return {}, error.message
    if found is None and not update:
        raise KvtoolError(
            "baseline",
            f"{suite.path} has no baseline yet: {suite.baseline} does not exist",
            f"{again} writes it; commit it once it is right",
        )
    return found or {}, None


def _differing(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """A note for every setting that the baseline was recorded with and that is another now."""
    before = then.get("settings", {})
    return [
        f"{name} is {now['settings'].get(name)}, the baseline was recorded with {before[name]}"
        for name in sorted(before)
        if before[name] != now["settings"].get(name)
    ]


def _told(progress: Progress | None, job: Job) -> Progress | None:
    if progress is None:
        return None
    return lambda done, total, what: progress(done, total, f"{job.name}: {what}")
