"""Outcome: what a check found, job by job, and whether it passes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtool.check.judge import KINDS, Kind, LayerMove, Row, Value
from kvtool.errors import KvtoolError

SCHEMA = "kvtool.check/1"


@dataclass(frozen=True)
class JobOutcome:
    """One job.

    Attributes:
        trace: its name in the suite; None for a job that only the baseline knows.
        rows: its cells; empty where it failed.
        error: why it failed, None where it ran.
        seconds: that the replay took.
        notes: what else a reader should know, such as settings that differ from the baseline's.
        warnings: of the replay.
        gone: rows of a job that the suite no longer has; 0 for any other.
    """

    name: str
    trace: str | None
    rows: tuple[Row, ...] = ()
    error: KvtoolError | None = None
    seconds: float = 0.0
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    gone: int = 0

    @property
    def kind(self) -> Kind:
        kinds = {row.kind for row in self.rows}
        if self.error is not None or self.gone:
            kinds.add("unknown")
        return next((kind for kind in KINDS if kind in kinds), "identical")

    def fails(self, strict: bool = False) -> bool:
        return self.error is not None or self.gone > 0 or any(row.fails(strict) for row in self.rows)

    def counts(self) -> dict[str, int]:
        """Outcome -> cells (per sequence) that have it as the one to look at first."""
        found = Counter(row.outcome for row in self.rows)
        found["failed"] += self.error is not None
        found["missing"] += self.gone
        return {outcome: count for outcome, count in sorted(found.items()) if count}


@dataclass(frozen=True)
class Check:
    """What a check found; it prints nothing.

    Attributes:
        jobs: in the order of the suite, then those that only the baseline knows.
        strict: whether what the baseline lacks is a failure too.
        updated: after an update whether the baseline's file changed; None without one.
        dropped: jobs that an update took out of the baseline, since the suite no longer has them.
        anew: why an update used nothing of the former baseline; None where it did, or where there was none.
    """

    suite: Path
    baseline: Path
    jobs: tuple[JobOutcome, ...]
    strict: bool = False
    updated: bool | None = None
    dropped: tuple[str, ...] = field(default=())
    anew: str | None = None

    @property
    def ok(self) -> bool:
        """Whether nothing fails. An update accepts what it finds."""
        return self.updated is not None or not any(job.fails(self.strict) for job in self.jobs)

    @property
    def kind(self) -> Kind:
        """`behaviour` where any decision moved beyond ties, `numerics` where only numbers moved."""
        kinds = {job.kind for job in self.jobs}
        return next((kind for kind in KINDS if kind in kinds), "identical")

    def counts(self) -> dict[str, int]:
        total: Counter[str] = Counter()
        for job in self.jobs:
            total.update(job.counts())
        return dict(sorted(total.items()))

    def document(self) -> dict[str, Any]:
        """The one JSON document that `--json` prints."""
        return {
            "schema": SCHEMA,
            "suite": str(self.suite),
            "baseline": str(self.baseline),
            "ok": self.ok,
            "strict": self.strict,
            "updated": self.updated,
            "kind": self.kind,
            "counts": self.counts(),
            "jobs": [_job(job, self.strict) for job in self.jobs],
            "dropped": list(self.dropped),
            "anew": self.anew,
            "warnings": [f"{job.name}: {text}" for job in self.jobs for text in job.warnings],
        }


def _job(job: JobOutcome, strict: bool) -> dict[str, Any]:
    from kvtool.check.sentences import row_sentence

    return {
        "name": job.name,
        "trace": job.trace,
        "passes": not job.fails(strict),
        "kind": job.kind,
        "error": None if job.error is None else {"code": job.error.code, "message": job.error.message},
        "counts": job.counts(),
        "seconds": round(job.seconds, 3),
        "notes": list(job.notes),
        "cells": [
            {
                "cell": row.name,
                "outcome": row.outcome,
                "kind": row.kind,
                "passes": not row.fails(strict),
                "message": row_sentence(row),
                "metrics": [_value(value) for value in row.values],
                "layers": [_layer(layer) for layer in row.layers if layer.kind != "identical"],
            }
            for row in job.rows
        ],
    }


def _value(value: Value) -> Mapping[str, Any]:
    both = value.old is not None and value.new is not None
    return {
        "metric": value.metric,
        "outcome": value.outcome,
        "direction": value.direction,
        "old": value.old,
        "new": value.new,
        "change": None if value.changed is None else list(value.changed),
        "difference": value.new - value.old if both else None,  # type: ignore[operator]
        "tolerance": {"relative": value.tolerance.relative, "absolute": value.tolerance.absolute},
    }


def _layer(layer: LayerMove) -> Mapping[str, Any]:
    return {
        "layer": layer.layer,
        "outcome": layer.outcome,
        "kind": layer.kind,
        "kv_heads": list(layer.kv_heads),
        "kept_old": [before for before, _ in layer.kept],
        "kept_new": [now for _, now in layer.kept],
        "error_old": layer.error[0],
        "error_new": layer.error[1],
    }
