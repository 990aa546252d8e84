"""Replay of a whole trace against the dumb loop: decisions, errors of the run and of every span between events, and
layers that read another's cache."""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest
import torch
from dumb import Cache, errors, simulate
from formulas import POLICIES
from traces import VALUE_DIM, write

from kvtool.replay import replay
from kvtool.result import Result
from kvtool.trace import Trace, open_trace

SCHEDULES = ("prompt-end", "every:3,from:2", "high-water:9", "prefill:5+every:4/after", "every:2/delay:1/block:3")
CHOSEN = ("h2o", "tova", "keydiff")
BUDGET, SINKS, WINDOW = 6, 1, 2


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return open_trace(write(tmp_path_factory.mktemp("replay") / "run.zarr"))


@pytest.fixture(scope="module")
def result(trace: Trace) -> Result:
    return replay(trace, CHOSEN, budgets=[BUDGET], schedules=SCHEDULES, sinks=SINKS, window=WINDOW, precision="float64")


@pytest.fixture(scope="module")
def dumb(trace: Trace) -> dict[tuple[int, int, str, str], Cache]:
    """(sequence, layer, policy, schedule) -> the layer as the dumb loop leaves it; a sharer has its donor's losses."""
    found: dict[tuple[int, int, str, str], Cache] = {}
    for sequence in trace.sequences:
        for layer_id in sequence.layer_ids:
            layer = sequence.layer(layer_id, dtype=torch.float64)
            for text in CHOSEN:
                for word in SCHEDULES:
                    key = (sequence.index, layer_id, text, word)
                    if layer.geometry.kv_source is None:
                        scores, own = POLICIES[text]
                        found[key] = simulate(layer, word, BUDGET, scores, sinks=SINKS, window=WINDOW, own=own)
                    else:
                        donor = found[sequence.index, layer.geometry.kv_source, text, word]
                        found[key] = Cache(layer)
                        found[key].left, found[key].events = donor.left, donor.events
    return found


def first_evaluated(dumb: dict[tuple[int, int, str, str], Cache], sequence: int, schedule: str) -> int:
    """The earliest event of the schedule on any layer of the sequence: its cells are measured from there."""
    mine = [cache for key, cache in dumb.items() if (key[0], key[3]) == (sequence, schedule)]
    return min((cache.events[0] for cache in mine if cache.events), default=mine[0].layer.prompt_length)


def table(result: Result, name: str) -> dict[tuple[int, int, str, str], list[dict[str, Any]]]:
    found = defaultdict(list)
    for entry in result.entries(name):
        if entry["policy"] in CHOSEN:
            found[entry["sequence"], entry["layer"], entry["policy"], entry["schedule"]].append(entry)
    return found


def test_decisions(result: Result, dumb: dict[tuple[int, int, str, str], Cache]) -> None:
    found = table(result, "evict_steps")
    assert set(found) == set(dumb)
    for key, entries in found.items():
        by_head = {entry["kv_head"]: entry["evict_step"] for entry in entries}
        assert [by_head[g] for g in sorted(by_head)] == dumb[key].evict_step(), key
    assert any(cache.left[0] != cache.left[1] for cache in dumb.values())


def relative(found: list[tuple[float, float, float]]) -> float | None:
    whole = math.fsum(f * f for _, f, _ in found)
    return math.sqrt(math.fsum(e * e for e, _, _ in found) / whole) if whole else None


def test_errors_of_the_run_and_of_every_span(result: Result, dumb: dict[tuple[int, int, str, str], Cache]) -> None:
    rows, spans = table(result, "rows"), 0
    for key, cache in dumb.items():
        since = first_evaluated(dumb, key[0], key[3])
        measured = errors(cache, since)
        by_event: dict[int | None, dict[int, dict[str, Any]]] = defaultdict(dict)
        for row in rows[key]:
            by_event[row["event"]][row["q_head"]] = row
        steps: dict[int | None, range] = {None: range(since, cache.tokens)}
        if key[3] != "prompt-end":
            steps |= {start: range(start, stop) for start, stop in pairwise([*cache.events, cache.tokens])}
        assert set(by_event) == set(steps), key
        spans += len(steps)
        for event, span in steps.items():
            for h in cache.heads:
                found = [measured[h, t] for t in span if (h, t) in measured]
                row = by_event[event][h]
                assert row["output_error"] == pytest.approx(relative(found), rel=1e-11, abs=1e-13), (key, event, h)
                mean = math.fsum(mass for _, _, mass in found) / len(found)
                assert row["evicted_mass"] == pytest.approx(mean, rel=1e-11, abs=1e-13), (key, event, h)
    assert spans > 200


def test_heads_are_summed_before_the_layer_is_measured(
    trace: Trace, result: Result, dumb: dict[tuple[int, int, str, str], Cache]
) -> None:
    entries = {key: {e["event"]: e for e in found} for key, found in table(result, "layers").items()}
    for key, cache in dumb.items():
        if key[:2] not in ((0, 3), (0, 8)):
            continue
        projection = trace.sequences[0].layer(key[1], dtype=torch.float64).output_projection
        assert projection is not None
        lost, whole = [], []
        for t in range(first_evaluated(dumb, 0, key[3]), cache.tokens):
            sums = torch.zeros(2, projection.shape[2], dtype=torch.float64)
            for h in cache.heads:
                everyone = [i for i in range(t + 1) if cache.sees(t, i)]
                alive = [i for i in everyone if cache.retained(h // cache.group, t, i)]
                for n, rows in enumerate((everyone, alive)):
                    output = torch.tensor(cache.output(h, t, rows), dtype=torch.float64)
                    assert output.numel() == VALUE_DIM
                    sums[n] += output @ projection[h]
            lost.append(float((sums[0] - sums[1]).norm()))
            whole.append(float(sums[0].norm()))
        expected = math.hypot(*lost) / math.hypot(*whole)
        assert entries[key][None]["layer_error"] == pytest.approx(expected, rel=1e-11, abs=1e-13), key


def test_counts(result: Result, dumb: dict[tuple[int, int, str, str], Cache]) -> None:
    for key, entries in table(result, "layers").items():
        (whole,) = (entry for entry in entries if entry["event"] is None)
        cache = dumb[key]
        evicted = sum(len(left) for left in cache.left)
        assert (whole["events"], whole["evicted"]) == (len(cache.events), evicted), key
        assert whole["no_effect"] == (evicted == 0), key
        if key[3] != "prompt-end":
            by_event = {e["event"]: e["evicted"] for e in entries if e["event"] is not None}
            assert by_event == {e: sum(list(left.values()).count(e) for left in cache.left) for e in cache.events}, key
