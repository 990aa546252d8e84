"""Prepare: everything that can be known to be wrong before the first job runs."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvtool.check.measures import Measure, further_metrics, measures_of
from kvtool.check.suite import Job, Suite
from kvtool.check.suite_values import in_suite_words
from kvtool.errors import KvtoolError
from kvtool.replay.plan import make_plan
from kvtool.replay.work import work_of
from kvtool.trace import Trace, open_trace
from kvtool.trace.verify import damage_error, verify_bytes

# Faults of the suite itself. Any other is one of the job, and the others still run.
ASKED_WRONGLY = {"usage", "suite", "not-eviction", "file-missing"}
ASKED_WRONGLY |= {f"{noun}-{fault}" for noun in ("policy", "metric") for fault in ("unknown", "parameter")}


@dataclass(frozen=True)
class Prepared:
    """A job that may run.

    Attributes:
        metrics: those that run besides the built-in ones.
        columns: what is recorded of every cell, empty where the job cannot run.
        fault: why it cannot, or None.
    """

    job: Job
    metrics: tuple[str, ...] = ()
    columns: Mapping[str, Measure] = field(default_factory=dict)
    fault: KvtoolError | None = None


def prepared(suite: Suite, traces: Mapping[str, Trace]) -> dict[str, Prepared]:
    """Job name -> the job, its options held against its trace; all jobs of the suite.

    Raises:
        KvtoolError: code `suite` where the suite asks for something that does not exist; that of the trace where one
            is at fault.
    """
    found = {}
    for job in suite.jobs:
        options = dict(job.options)
        layers, sequences = options.pop("layers", None), options.pop("sequences", None)
        try:
            with contextlib.chdir(suite.folder):
                further = further_metrics(job)
                plan = make_plan(job.policies, **options, metrics=further)
                columns = measures_of(job, plan)
                work_of(traces[job.trace], plan, layers, sequences)
            found[job.name] = Prepared(job, further, columns)
        except KvtoolError as error:
            # A file that is there and cannot be loaded has a cause: the job is at fault, not the suite.
            if error.code in ASKED_WRONGLY and error.__cause__ is None:
                said = in_suite_words(error)
                raise KvtoolError("suite", f"{suite.path}: job {job.name!r}: {said.message}", said.hint) from error
            refuse_faulty_trace(job, error)
            found[job.name] = Prepared(job, fault=error)
    if not any(one.fault for one in found.values()):  # whose columns nobody knows
        suite.refuse_other_tolerances(name for one in found.values() for name in one.columns)
    return found


def traces_of(suite: Suite) -> dict[str, Trace]:
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


def refuse_other_traces(suite: Suite, jobs: list[Job], baseline: Mapping[str, Any]) -> None:
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


def refuse_faulty_trace(job: Job, error: KvtoolError) -> None:
    """A trace that is damaged, unsafe or unfinished says nothing of the policies: no check can be made on it. One that
    lacks what a policy needs is whole, and the job is at fault.

    Raises:
        KvtoolError: of the same code, naming the job.
    """
    if error.code.startswith("trace-") and error.code != "trace-lacks":
        raise KvtoolError(error.code, f"job {job.name!r}, trace {job.trace!r}: {error.message}", error.hint) from error
