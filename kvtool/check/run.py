"""Run: from a suite's file to what moved, and, on request, to a new baseline."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvtool.check.baseline import read_baseline, write_baseline
from kvtool.check.digits import steady
from kvtool.check.judge import judge_job
from kvtool.check.observe import measures_of, merged, observe
from kvtool.check.outcome import Check, JobOutcome
from kvtool.check.suite import Job, Suite, read_suite
from kvtool.errors import KvtoolError
from kvtool.files import Lock, writing
from kvtool.replay import replay
from kvtool.replay.plan import make_plan
from kvtool.replay.work import work_of
from kvtool.result import Result
from kvtool.trace import Trace, open_trace
from kvtool.trace.verify import damage_error, verify_bytes

Progress = Callable[[int, int, str], None]
# Faults of the suite itself. Any other is one of the job, and the others still run.
ASKED_WRONGLY = ("usage", "policy-unknown", "policy-parameter", "not-eviction", "file-missing")


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
        force: replace results there.
        progress: told (units done, all, what is being done) of each job.

    Raises:
        KvtoolError: `suite`, `trace-changed`, `baseline` and whatever opening a trace says, before anything runs;
            `job-failed` where an update would lose a job.
    """
    suite = read_suite(path)
    jobs = suite.chosen([only] if isinstance(only, str) else only)
    columns = {job.name: measures_of(job) for job in jobs}
    folders = _folders(jobs, None if output is None else Path(output).resolve(), force)
    with _held(suite.baseline, update):
        baseline = _baseline(suite, update)
        traces = _traces(suite)
        if not update:
            _refuse_other_traces(suite, jobs, baseline)
        faults = _planned(suite, jobs, traces)
        found: dict[str, dict[str, Any]] = {}
        outcomes = []
        for job in jobs:
            began, then = time.monotonic(), baseline.get(job.name, {})
            result: Result | None = None
            fault = faults.get(job.name)
            if fault is None:
                try:
                    with contextlib.chdir(suite.folder):
                        result = replay(traces[job.trace], job.policies, **job.options, progress=_told(progress, job))
                except KvtoolError as error:
                    fault = error
            seconds = time.monotonic() - began
            if result is None:
                outcomes.append(JobOutcome(job.name, job.trace, error=fault, seconds=seconds))
                continue
            if job.name in folders:
                result.save(folders[job.name])
            new = found[job.name] = observe(job, result)
            known = columns[job.name]
            rows = judge_job(
                then,
                new,
                suite.tolerance,
                # A metric that only the baseline knows is missing, whichever way is better.
                lambda metric, known=known: known[metric].direction if metric in known else "none",  # type: ignore[misc]
            )
            notes = _differing(then, new)
            outcomes.append(
                JobOutcome(job.name, job.trace, tuple(rows), None, seconds, tuple(notes), tuple(result.warnings))
            )
        gone = [name for name in sorted(baseline) if name not in {job.name for job in suite.jobs}] if not only else []
        outcomes += [JobOutcome(name, None, gone=max(1, len(baseline[name]["cells"]))) for name in gone]
        whole = Check(suite.path, suite.baseline, tuple(outcomes), strict)
        return _updated(whole, suite, baseline, found, gone) if update else whole


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
    kept |= {name: merged(baseline.get(name), new, steady) for name, new in found.items()}
    changed = write_baseline(suite.baseline, kept)
    return Check(whole.suite, whole.baseline, whole.jobs, whole.strict, changed, tuple(gone))


@contextlib.contextmanager
def _held(baseline: Path, update: bool) -> Iterator[None]:
    """Nobody else updates the same baseline in the meantime.

    Raises:
        KvtoolError: `file-missing` where its folder is not there, `locked`, `write-failed`.
    """
    if not baseline.parent.is_dir():
        raise KvtoolError("file-missing", f"{baseline.parent}, where the baseline belongs, is no folder")
    if not update:
        yield
        return
    with writing(baseline):
        lock = Lock(baseline)
    try:
        yield
    finally:
        lock.release()


def _baseline(suite: Suite, update: bool) -> dict[str, dict[str, Any]]:
    found = read_baseline(suite.baseline)
    if found is None and not update:
        raise KvtoolError(
            "baseline",
            f"{suite.path} has no baseline yet: {suite.baseline} does not exist",
            f"kvtool check {suite.path} --update writes it; commit it once it is right",
        )
    return found or {}


def _traces(suite: Suite) -> dict[str, Trace]:
    """Every trace of the suite, whichever jobs run.

    Raises:
        KvtoolError: `trace-changed` naming both digests; what opening or verifying a trace says.
    """
    opened = {}
    for name, wanted in suite.traces.items():
        trace = open_trace(wanted.path)
        if trace.digest != wanted.digest:
            raise KvtoolError(
                "trace-changed",
                f"trace {name!r} ({wanted.path}) has the digest {trace.digest}, the suite expects {wanted.digest}",
                "bring the recorded trace back; if it was captured anew on purpose, write its digest into "
                f"{suite.path} and run --update",
            )
        if suite.verify:
            report = verify_bytes(wanted.path)
            if report.damage:
                raise damage_error(wanted.path, report)
        opened[name] = trace
    return opened


def _refuse_other_traces(suite: Suite, jobs: list[Job], baseline: Mapping[str, Any]) -> None:
    """Numbers of two traces are not compared.

    Raises:
        KvtoolError: code `trace-changed`.
    """
    for job in jobs:
        now, then = suite.traces[job.trace].digest, baseline.get(job.name, {}).get("trace")
        if then not in (None, now):
            raise KvtoolError(
                "trace-changed",
                f"job {job.name!r} was recorded on a trace with the digest {then}, the suite now names {now}",
                "run --update to record the job anew, and say in the commit why the trace changed",
            )


def _planned(suite: Suite, jobs: list[Job], traces: Mapping[str, Trace]) -> dict[str, KvtoolError]:
    """Check every job's options against its trace before the first one runs; job -> why it cannot run.

    Raises:
        KvtoolError: code `suite` where the suite asks for something that does not exist.
    """
    faults = {}
    for job in jobs:
        options = dict(job.options)
        layers, sequences = options.pop("layers", None), options.pop("sequences", None)
        try:
            with contextlib.chdir(suite.folder):
                work_of(traces[job.trace], make_plan(job.policies, **options), layers, sequences)
        except KvtoolError as error:
            # A policy's file that is there and cannot be loaded has a cause: the job is at fault, not the suite.
            if error.code in ASKED_WRONGLY and error.__cause__ is None:
                raise KvtoolError("suite", f"{suite.path}: job {job.name!r}: {error.message}", error.hint) from error
            faults[job.name] = error
    return faults


def _folders(jobs: list[Job], output: Path | None, force: bool) -> dict[str, Path]:
    """Job -> where its result is kept.

    Raises:
        KvtoolError: `usage` where two names make one folder, `output-exists` for a result without `force`.
    """
    found: dict[str, Path] = {}
    for job in jobs if output is not None else ():
        assert output is not None
        folder = output / (re.sub(r"[^\w.-]+", "-", job.name).strip("-.") or "job")
        if folder in found.values():
            raise KvtoolError("usage", f"two jobs would be kept in {folder}", "give them names that differ in letters")
        if folder.is_file():
            raise KvtoolError("usage", f"{folder} is a file, not a folder for results")
        if (folder / "manifest.json").exists() and not force:
            raise KvtoolError("output-exists", f"{folder} holds a result already", "choose another -o, or add --force")
        found[job.name] = folder
    return found


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
