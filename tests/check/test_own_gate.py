"""kvtool's own suite: it covers every built-in policy on the traces that are stored, and runs where changes land."""

from __future__ import annotations

import json
from pathlib import Path

from kvtool.check.suite import read_suite
from kvtool.policies import ALL
from kvtool.registry import split_spec

from .conftest import DIGESTS, SAMPLES

ROOT = SAMPLES.parent
SUITE = read_suite(SAMPLES / "check.toml")
JOBS = json.loads((SAMPLES / "check.json").read_text())["jobs"]


def test_its_traces_are_the_stored_ones() -> None:
    assert {name: trace.digest for name, trace in SUITE.traces.items()} == DIGESTS
    assert {job["trace"] for job in JOBS.values()} == set(DIGESTS.values())


def test_every_built_in_policy_is_covered_on_every_trace() -> None:
    for trace in SUITE.traces:
        covered: set[str] = set()
        for job in SUITE.jobs:
            if job.trace == trace:
                covered |= {split_spec(key.split(" @")[0]).name for key in JOBS[job.name]["cells"]}
        assert set(ALL) <= covered


def test_repeating_schedules_and_predicted_kl_are_covered() -> None:
    cells = [(key, cell) for job in JOBS.values() for key, cell in job["cells"].items()]
    for schedule in ("every:16", "high-water:64", "prefill:32+every:16"):
        assert any(f" {schedule} " in key for key, _ in cells)
    assert sum(cell.get("predicted_kl") is not None for _, cell in cells) >= len(ALL) - 1
    assert all(job.decisions and job.options["precision"] == "float64" for job in SUITE.jobs)


def test_it_runs_before_a_change_lands() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    makefile = (ROOT / "Makefile").read_text()
    assert "make check" in script
    assert "check sample_traces/check.toml --strict --no-plugins" in makefile
    assert "check sample_traces/check.toml --update" in makefile


def test_a_clone_holds_what_it_needs() -> None:
    for trace in SUITE.traces.values():
        assert (trace.path / "COMMIT.json").is_file()
    assert SUITE.baseline == Path(SAMPLES / "check.json")
