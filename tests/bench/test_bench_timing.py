"""Timing: rounds in turn, medians of ratios, and a limit, all by a clock that tests move."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvtool.bench.goals import Goal, Measured, entry
from kvtool.bench.timing import OutOfTime, Rounds, Stopwatch, one_thread


class Clock:
    """Time that passes only when somebody works."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def work(self, seconds: float, log: list[str], name: str) -> Callable[[], None]:
        def part() -> None:
            self.now += seconds
            log.append(name)

        return part


def watch(seconds: float = 1000.0) -> tuple[Stopwatch, Clock]:
    clock = Clock()
    return Stopwatch(seconds, cpu=clock, wall=clock), clock


def test_parts_run_in_turn_and_ratios_are_of_each_round() -> None:
    stopwatch, clock = watch()
    log: list[str] = []
    rounds = stopwatch.paired({"a": clock.work(2, log, "a"), "b": clock.work(1, log, "b")}, 30.0)
    assert log == ["a", "b"] * (len(log) // 2)
    assert rounds.median("a") == pytest.approx(2)
    found = rounds.ratio("a", "b", 3.0, note=1)
    assert (found.ratio, found.spread) == (pytest.approx(6), (pytest.approx(6), pytest.approx(6)))
    assert found.runs == len(log) // 2 - 1  # the first round warmed up
    assert found.detail == {"seconds": {"a": pytest.approx(2), "b": pytest.approx(1)}, "note": 1}
    assert clock.now <= 30


def test_the_median_is_of_ratios_and_not_a_ratio_of_medians() -> None:
    found = Rounds({"a": [1.0, 10.0, 3.0], "b": [1.0, 5.0, 1.0]}).ratio("a", "b")
    assert (found.ratio, found.spread, found.runs) == (2.0, (1.0, 3.0), 3)
    assert Rounds({"a": [3.0, 1.0, 2.0]}).alone("a").ratio == 2.0


def test_a_short_part_is_called_more_often_and_timed_per_call() -> None:
    stopwatch, clock = watch()
    log: list[str] = []
    rounds = stopwatch.paired({"long": clock.work(1, log, "l"), "short": clock.work(0.001, log, "s")}, 20.0)
    assert log.count("s") > 10 * log.count("l")
    assert rounds.median("short") == pytest.approx(0.001)


def test_a_long_first_round_counts_and_three_rounds_are_wanted() -> None:
    stopwatch, clock = watch()
    log: list[str] = []
    rounds = stopwatch.paired({"a": clock.work(4, log, "a")}, 10.0)
    assert rounds.ratio("a", "a").runs == 3
    stopwatch, clock = watch()
    assert stopwatch.paired({"a": clock.work(30, log, "a")}, 10.0).ratio("a", "a").runs == 1


def test_no_round_begins_that_would_end_after_the_whole_time() -> None:
    stopwatch, clock = watch(10.0)
    stopwatch.paired({"a": clock.work(4, [], "a")}, 100.0)
    assert clock.now == 8
    clock.now = 10.5
    with pytest.raises(OutOfTime):
        stopwatch.paired({"a": clock.work(1, [], "a")}, 5.0)


def test_one_thread_is_undone() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with one_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("ratio", "at_most", "met"), [(2.0, True, True), (2.5, True, False), (2.0, False, True), (1.9, False, False)]
)
def test_goals_have_a_direction(ratio: float, at_most: bool, met: bool) -> None:
    assert entry(Goal("x", 2.0, at_most, "y"), Measured(ratio, (ratio, ratio), 1))["met"] is met


def test_what_was_not_measured_is_null_with_a_reason() -> None:
    line = entry(Goal("x", 2.0, True, "y", 1.0), Measured.without("no card"))
    assert (line["ratio"], line["met"], line["spread"], line["reason"]) == (None, None, None, "no card")
    assert entry(Goal("x", None, True, "y"), Measured(3.0, (3.0, 3.0), 1))["met"] is None
    with pytest.raises(AssertionError):
        entry(Goal("x", 2.0, True, "y"), Measured(float("nan")))
