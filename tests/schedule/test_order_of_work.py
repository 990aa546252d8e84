"""Threads, the order of sequences and what ran before change nothing, byte for byte, under schedules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from layers import make
from traces import write

from kvtool.replay import replay
from kvtool.result import Result
from kvtool.view import View

SAMPLES = Path(__file__).resolve().parents[2] / "sample_traces"
POLICIES = ["h2o", "tova", "capacity:blend=0.5", "random:seed=3"]
SCHEDULES = ["every:3,from:2", "high-water:9,from:0/after", "prefill:5+every:4/delay:1"]
TABLES = ("cells", "layers", "rows", "ages", "evict_steps")


def said(result: Result, sequence: int) -> str:
    """Everything that is said of one sequence, its place in the trace apart."""
    entries: dict[str, list[dict[str, Any]]] = {}
    for table in TABLES:
        entries[table] = [
            {name: value for name, value in entry.items() if name != "sequence"}
            for entry in result.entries(table)
            if entry["sequence"] == sequence
        ]
        assert entries[table], table
    return json.dumps(entries)


@pytest.mark.parametrize("word", SCHEDULES)
def test_a_sequence_does_not_know_its_neighbours(tmp_path: Path, word: str) -> None:
    def run(name: str, lengths: tuple[int, ...], order: tuple[int, ...]) -> Result:
        trace = write(tmp_path / name, lengths, order=order, layers=(2, 3))
        return replay(trace, POLICIES, budgets=[6], schedules=[word], sinks=1, window=1)

    forth, back = run("ab", (17, 14), (0, 1)), run("ba", (14, 17), (1, 0))
    alone = run("b", (14,), (1,))
    assert said(forth, 1) == said(back, 0) == said(alone, 0)
    assert said(forth, 0) == said(back, 1)


def test_threads_change_nothing() -> None:
    """Every decision and every error is the same bytes. A leverage sum that is only reported may round otherwise where
    the linear algebra library splits its work."""
    decided, told, leverage = set(), set(), []
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            result = replay(
                SAMPLES / "smollm2.zarr",
                ["h2o", "tova", "snapkv", "jacap"],
                budgets=[64],
                schedules=["every:16", "high-water:100/block:16"],
                sequences=[0],
                layers=[0],
            )
            decided.add(json.dumps(result.entries("evict_steps")))
            rows = result.entries("rows")
            leverage.append([row.pop("rho") or 0.0 for row in rows])
            told.add(json.dumps([rows, *(result.entries(table) for table in ("cells", "layers", "ages"))]))
    finally:
        torch.set_num_threads(1)
    assert len(decided) == 1
    assert len(told) == 1
    assert leverage[1] == pytest.approx(leverage[0], rel=1e-12)
    assert leverage[2] == pytest.approx(leverage[0], rel=1e-12)


def test_every_event_has_a_random_stream_of_its_own() -> None:
    layer = make("full")
    drawn = [tuple(View.at(layer, step).stream(0, head).random(4)) for step in range(1, 20) for head in range(2)]
    assert len(set(drawn)) == len(drawn)
    assert drawn[:2] == [tuple(View.at(layer, 1).stream(0, head).random(4)) for head in range(2)]
