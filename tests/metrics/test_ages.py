"""Ages, survival and lifetimes against loops over tokens and against small cases worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvtool.layer import Geometry
from kvtool.metrics import AGE_COLUMNS, ages
from kvtool.metrics.ages import histogram, mean_over_heads
from kvtool.retained import Event, RetainedSet

FULL = Geometry(layer=0, query_heads=2, kv_heads=2, key_dim=4, value_dim=4, scale=1.0)


def sliding(window: int) -> Geometry:
    return Geometry(0, 2, 2, 4, 4, 1.0, kind="sliding", window=window)


def event_at(step: int, sinks: int = 2, window: int = 5) -> Event:
    none = torch.zeros(2)
    return Event(step, torch.arange(step), *[none] * 6, sinks=sinks, window=window)


def random_run(tokens: int, steps: list[int], window: int | None = None, seed: int = 0) -> RetainedSet:
    """At every event each unprotected candidate leaves with probability 0.4."""
    g = torch.Generator().manual_seed(seed)
    evict = torch.full((2, tokens), tokens, dtype=torch.int32)
    for step in steps:
        for head in range(2):
            for row in range(2, step - 5):
                seen = window is None or step - row < window
                if seen and int(evict[head, row]) == tokens and float(torch.rand(1, generator=g)) < 0.4:
                    evict[head, row] = step
    return RetainedSet(evict, [event_at(step) for step in steps])


def run(retained: RetainedSet, geometry: Geometry = FULL, **options: Any) -> list[dict[str, Any]]:
    return ages(retained, geometry, **{"prompt_length": 30, "sinks": 2, "window": 5, **options})


def test_an_entry_for_every_event_and_head_and_one_for_the_end() -> None:
    entries = run(random_run(63, [30, 40, 50]))
    assert [(e["kv_head"], e["event"]) for e in entries] == [(h, s) for h in (0, 1) for s in (30, 40, 50, None)]
    names = {column.name for column in AGE_COLUMNS}
    assert all(set(entry) == names | {"kv_head", "event"} for entry in entries)
    assert {column.level for column in AGE_COLUMNS} == {"kv_head"}


@pytest.mark.parametrize("window", [None, 17])
def test_pools_and_survivors_against_a_loop(window: int | None) -> None:
    retained = random_run(63, [30, 40, 50], window)
    geometry = FULL if window is None else sliding(window)
    found = run(retained, geometry)
    for entry in found:
        leaves = retained.evict_step[entry["kv_head"]].tolist()
        step = 63 if entry["event"] is None else entry["event"]
        seen = [p for p in range(step) if window is None or step - p < window]
        pool = [step - p for p in seen if leaves[p] >= step]
        kept = [step - p for p in seen if leaves[p] > step or (entry["event"] is None and leaves[p] == 63)]
        for prefix, expected in (("pool", pool), ("kept", kept)):
            assert entry[f"{prefix}_tokens"] == len(expected)
            assert entry[f"{prefix}_age_min"] == min(expected) >= 1
            assert entry[f"{prefix}_age_max"] == max(expected)
            assert entry[f"{prefix}_age_mean"] == pytest.approx(sum(expected) / len(expected), rel=1e-14)
            for name, share in (("p10", 10), ("p50", 50), ("p90", 90)):
                assert entry[f"{prefix}_age_{name}"] == pytest.approx(np.percentile(expected, share), rel=1e-14)
            counts = [0] * (int(math.log2(max(expected))) + 1)
            for age in expected:
                counts[int(math.log2(age))] += 1
            assert entry[f"{prefix}_age_histogram"] == counts
        rows = [step - age for age in kept]
        sinks = sum(p < 2 for p in rows)
        recent = sum(p >= 2 and p >= step - 5 for p in rows)
        shares = [entry[f"kept_{part}_share"] * len(kept) for part in ("sinks", "window", "flexible")]
        assert shares == pytest.approx([sinks, recent, len(kept) - sinks - recent])
        if entry["event"] is None:
            told = [e for e in found if e["kv_head"] == entry["kv_head"] and e["event"] is not None]
            candidates = sum(e["pool_tokens"] for e in told)
            assert entry["turnover_candidates"] == candidates
            lost = sum(e["pool_tokens"] - e["kept_tokens"] for e in told)
            assert entry["turnover"] == pytest.approx(lost / candidates, rel=1e-14)
        else:
            assert entry["turnover"] == pytest.approx((len(pool) - len(kept)) / len(pool), rel=1e-14)


def test_bins_are_powers_of_two() -> None:
    assert histogram(torch.tensor([1, 2, 3, 4, 7, 8, 15, 16])) == [1, 2, 2, 2, 1]
    assert histogram(torch.tensor([5])) == [0, 0, 1]
    assert histogram(torch.tensor([], dtype=torch.int64)) == []
    assert histogram(torch.arange(1, 1025)) == [2**b for b in range(10)] + [1]


def test_survival_counts_exposures_and_not_years() -> None:
    """Ten prompt tokens, two protected at each end; worked out by hand."""
    evict = torch.full((1, 14), 14, dtype=torch.int32)
    evict[0, [2, 3, 4]] = 10  # exposed once: rows 2..7; three of six leave
    evict[0, [5]] = 12  # second event exposes 5, 6, 7 (again) and 8, 9 (first time)
    evict[0, [8]] = 12
    retained = RetainedSet(evict, [event_at(10, 2, 2), event_at(12, 2, 2)])
    first, second, end = ages(retained, FULL, prompt_length=10, sinks=2, window=2)
    assert first["survival_prompt"] == [0.5]
    assert first["survival_prompt_at_risk"] == [6]
    # First exposure now: 6 + 2 at risk, 3 + 1 left. Second: 3 at risk, 1 left.
    assert second["survival_prompt_at_risk"] == [8, 3]
    assert second["survival_prompt"] == pytest.approx([0.5, 0.5 * 2 / 3], rel=1e-15)
    assert end["survival_prompt"] == second["survival_prompt"]
    assert second["survival_decode"] == []


def test_prompt_and_decode_tokens_survive_apart_against_a_loop() -> None:
    retained = random_run(63, [30, 37, 44, 51, 58], window=29)
    for entry in run(retained, sliding(29)):
        leaves = retained.evict_step[entry["kv_head"]].tolist()
        last = 63 if entry["event"] is None else entry["event"]
        for part, rows in (("prompt", range(30)), ("decode", range(30, 63))):
            risk: dict[int, int] = {}
            left: dict[int, int] = {}
            for p in rows:
                exposure = 0
                for e in retained.events:
                    if e.step > last or not 2 <= p < e.step - 5 or e.step - p >= 29 or leaves[p] < e.step:
                        continue
                    risk[exposure] = risk.get(exposure, 0) + 1
                    left[exposure] = left.get(exposure, 0) + (leaves[p] == e.step)
                    exposure += 1
            curve, alive = [], 1.0
            for k in sorted(risk):
                alive *= 1 - left[k] / risk[k]
                curve.append(alive)
            assert entry[f"survival_{part}"] == pytest.approx(curve, rel=1e-13)
            assert entry[f"survival_{part}_at_risk"] == [risk[k] for k in sorted(risk)]


def test_a_token_that_left_in_spite_of_protection_was_exposed() -> None:
    evict = torch.full((1, 12), 12, dtype=torch.int32)
    evict[0, 2:9] = 10  # rows 6..9 are the window of four: the budget was too small for it
    retained = RetainedSet(evict, [event_at(10, 2, 4)])
    entry = ages(retained, FULL, prompt_length=10, sinks=2, window=4)[0]
    assert entry["survival_prompt_at_risk"] == [7]
    assert entry["survival_prompt"] == [0.0]


@pytest.mark.parametrize("kind", ["full", "sliding", "chunked"])
def test_lifetimes_are_numbers_of_queries_that_saw_the_token(kind: str) -> None:
    geometry = Geometry(0, 2, 2, 4, 4, 1.0, kind=kind, window=None if kind == "full" else 16)  # type: ignore[arg-type]
    retained = random_run(63, [30, 40, 50], seed=3)
    entries = run(retained, geometry)
    for head in range(2):
        leaves = retained.evict_step[head].tolist()
        evicted, censored = [], []
        for p in range(63):
            first = geometry.first_visible(torch.arange(63)).tolist()
            visible = [t for t in range(p, 63) if first[t] <= p]
            saw = [t for t in visible if t < leaves[p]]
            (evicted if len(saw) < len(visible) else censored).append(len(saw))
        end = entries[4 * head + 3]
        assert end["event"] is None
        assert end["lifetime_evicted_histogram"] == histogram(torch.tensor(evicted))
        assert end["lifetime_censored_histogram"] == histogram(torch.tensor(censored))
        assert entries[4 * head]["lifetime_evicted_histogram"] is None


def frozen_of(chosen: list[list[int]], **options: Any) -> list[bool]:
    """`frozen` at each event for a run that keeps these flexible rows (of 2..19) after each."""
    steps = [25 + 5 * i for i in range(len(chosen))]
    evict = torch.full((1, 60), 60, dtype=torch.int32)
    alive = set(range(2, 55))
    for step, keep in zip(steps, chosen, strict=True):
        for row in sorted(alive):
            if row < step - 5 and row not in keep:
                evict[0, row] = step
                alive.discard(row)
    retained = RetainedSet(evict, [event_at(step) for step in steps])
    return [e["frozen"] for e in ages(retained, FULL, prompt_length=20, sinks=2, window=5, **options)]


def test_a_head_is_frozen_after_four_events_without_a_change() -> None:
    assert frozen_of([[3, 4]] * 6) == [False] * 4 + [True] * 3
    assert frozen_of([[3, 4, 5], *[[3, 4]] * 5]) == [False] * 5 + [True] * 2
    assert frozen_of([[3, 4]] * 4 + [[3]] * 2) == [False] * 7
    assert frozen_of([[3, 4]] * 3, frozen_after=1) == [False, True, True, True]


def test_an_empty_pool_has_no_ages() -> None:
    evict = torch.full((1, 12), 12, dtype=torch.int32)
    evict[0, :10] = 10
    geometry = Geometry(0, 1, 1, 4, 4, 1.0)
    first, end = ages(RetainedSet(evict, [event_at(10)]), geometry, prompt_length=10, sinks=2, window=2)
    assert first["kept_tokens"] == 0
    assert first["kept_age_mean"] is None
    assert first["kept_flexible_share"] is None
    assert first["turnover"] == 1.0
    assert end["pool_tokens"] == 2


def test_means_over_heads_weight_tokens() -> None:
    evict = torch.full((2, 20), 20, dtype=torch.int32)
    evict[0, 2:14] = 16  # head 0 keeps 4 of 16, head 1 all
    retained = RetainedSet(evict, [event_at(16)])
    first = [e for e in ages(retained, FULL, prompt_length=16, sinks=2, window=2) if e["event"] == 16]

    def every_age(rows: Tensor) -> list[int]:
        return (16 - rows).tolist()

    all_ages = every_age(torch.tensor([0, 1, 14, 15])) + every_age(torch.arange(16))
    assert mean_over_heads(first, "kept_age_mean") == pytest.approx(sum(all_ages) / len(all_ages), rel=1e-14)
    assert mean_over_heads(first, "kept_sinks_share") == pytest.approx(4 / 20, rel=1e-14)
    assert mean_over_heads([], "kept_age_mean") is None


def test_many_events_are_told_evenly_and_counted_in_full() -> None:
    """What is left out of the entries still counts: curves at the end are those of a run that tells everything."""
    steps = list(range(20, 60))
    retained = random_run(63, steps, seed=4)
    everything, some = run(retained), run(retained, most_events=5)
    told = [e["event"] for e in some if e["kv_head"] == 0]
    assert told == [20, steps[10], steps[20], steps[29], 59, None]
    by_place = {(e["kv_head"], e["event"]): e for e in everything}
    assert all(entry == by_place[entry["kv_head"], entry["event"]] for entry in some)
    assert len(everything) == 2 * 41


@pytest.mark.parametrize("window", [None, 23])
def test_protection_that_widens_and_narrows_decides_exposure(window: int | None) -> None:
    """Rows protected at one event are exposed at the next, heads ragged, against a loop over tokens."""
    shields = [(2, 5), (6, 12), (2, 1), (0, 8)]
    steps = [30, 36, 45, 52]
    g = torch.Generator().manual_seed(9)
    evict = torch.full((2, 63), 63, dtype=torch.int32)
    for step, (sinks, newest) in zip(steps, shields, strict=True):
        for head, chance in ((0, 0.2), (1, 0.6)):
            for row in range(sinks, step - newest):
                seen = window is None or step - row < window
                if seen and int(evict[head, row]) == 63 and float(torch.rand(1, generator=g)) < chance:
                    evict[head, row] = step
    events = [event_at(step, *shield) for step, shield in zip(steps, shields, strict=True)]
    entries = run(RetainedSet(evict, events), FULL if window is None else sliding(window))
    sizes = set()
    for entry in entries:
        leaves, last = evict[entry["kv_head"]].tolist(), entry["event"] or 63
        sizes.add((entry["event"], entry["kept_tokens"]))
        exposures = {}
        for row in range(63):
            met = [
                step
                for step, (sinks, newest) in zip(steps, shields, strict=True)
                if step <= last and sinks <= row < step - newest and leaves[row] >= step
                if window is None or step - row < window
            ]
            exposures[row] = met
        for part, rows in (("prompt", range(30)), ("decode", range(30, 63))):
            risk = [sum(len(exposures[r]) > k for r in rows) for k in range(4)]
            left = [sum(len(exposures[r]) > k and leaves[r] == exposures[r][k] for r in rows) for k in range(4)]
            assert entry[f"survival_{part}_at_risk"] == [r for r in risk if r]
            alive, curve = 1.0, []
            for r, gone in zip(risk, left, strict=True):
                if r:
                    alive *= 1 - gone / r
                    curve.append(alive)
            assert entry[f"survival_{part}"] == pytest.approx(curve, rel=1e-13, abs=1e-15)
    assert len({size for event, size in sizes if event == 52}) == 2  # the heads are ragged
