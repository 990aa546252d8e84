"""What the terminal says of repeating schedules: sparklines, equal mean cache, ages, policies without effect."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from kvtool.replay import replay
from kvtool.report.ages_summary import age_lines
from kvtool.report.equal_cache import equal_cache, interpolated
from kvtool.report.sparkline import BLOCKS, PLAIN, condensed, sparkline
from kvtool.report.summary import Section, sections, verdicts
from kvtool.report.terminal import replay_table
from kvtool.report.terminal_ages import ages_tables
from kvtool.report.terminal_time import OverTime
from kvtool.result import Result

TINY = Path(__file__).resolve().parents[2] / "sample_traces" / "tiny-gqa.zarr"


@pytest.fixture(scope="module")
def result() -> Result:
    schedules = ["every:8", "prompt-end"]
    return replay(TINY, ["h2o", "knorm"], budgets=[24, 48, 400], schedules=schedules, window=4, telemetry=True)


def printed(parts: list[object], width: int, encoding: str = "utf-8") -> str:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="replace")
    console = Console(file=file, width=width, highlight=False)
    for part in parts:
        console.print(part)
    file.flush()
    return file.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined]


def test_a_sparkline_is_as_tall_as_its_values() -> None:
    assert sparkline([0.0, 1.0, None, 0.5], 0.0, 1.0) == BLOCKS[0] + BLOCKS[-1] + " " + BLOCKS[4]
    assert sparkline([0.0, 1.0], 0.0, 1.0, plain=True) == PLAIN[0] + PLAIN[-1]
    assert sparkline([3.0, 3.0], 3.0, 3.0) == BLOCKS[0] * 2
    assert condensed([1.0, 3.0, None, 5.0], 2) == [2.0, 5.0]
    assert condensed([None, None, 4.0, 6.0], 2) == [None, 5.0]
    assert condensed([1.0, 2.0], 32) == [1.0, 2.0]


def test_terminals_without_unicode_get_plain_marks() -> None:
    part = OverTime("t", [("a", [0.0, 1.0]), ("b", [0.5, None])])
    assert f"a  {BLOCKS[0]}{BLOCKS[-1]}  0.0000 to 1.0000" in printed([part], 80)
    plain = printed([part], 80, "ascii")
    assert f"a  {PLAIN[0]}{PLAIN[-1]}" in plain
    assert plain.isascii()


def test_errors_are_interpolated_between_own_points_and_never_beyond() -> None:
    points = [(100.0, 0.1), (50.0, 0.3), (100.0, 0.2)]
    assert interpolated(points, 50.0) == 0.3
    assert interpolated(points, 100.0) == pytest.approx(0.15)
    assert interpolated(points, 75.0) == pytest.approx(0.225)
    assert interpolated(points, 49.0) is None
    assert interpolated(points, 101.0) is None
    assert interpolated([], 50.0) is None


def test_schedules_are_compared_at_the_sizes_of_the_first(result: Result) -> None:
    found = sections(result)
    sizes, curves = equal_cache(found)
    by_curve = {(curve.policy, curve.schedule): curve.errors for curve in curves}
    assert set(by_curve) == {(p, s) for p in ("h2o", "knorm", "random") for s in ("every:8", "prompt-end")}
    lines = {(s.budget, ln.policy, ln.schedule): ln for s in found for ln in s.lines}
    own = [lines[budget, "random", "every:8"] for budget in (24, 48)]
    assert sizes == pytest.approx([line.mean_cache_tokens for line in own], rel=1e-12)
    assert by_curve["random", "every:8"] == [line.rank for line in own]
    low, high = (lines[budget, "random", "prompt-end"] for budget in (24, 48))
    at = (sizes[1] - low.mean_cache_tokens) / (high.mean_cache_tokens - low.mean_cache_tokens)
    expected = low.rank + at * (high.rank - low.rank)
    assert by_curve["random", "prompt-end"] == [None, pytest.approx(expected, rel=1e-12)]


def test_where_all_hold_the_same_there_is_nothing_to_make_equal() -> None:
    once = replay(TINY, ["h2o"], budgets=[24, 48], window=4, layers=[0, 3])
    assert equal_cache(sections(once)) == ([], [])
    assert equal_cache([Section(None, 24, [])]) == ([], [])


def test_a_policy_without_effect_is_named_and_never_ranked(result: Result) -> None:
    section = next(s for s in sections(result) if s.budget == 400)
    assert all(line.no_effect == (line.policy != "full") for line in section.lines)
    assert [line.rank for line in section.lines if line.policy != "full"] == [None] * 6
    assert (section.best, section.winner) == (None, None)
    assert verdicts(result)[-1] == "budget 400: no policy had an effect, so nothing is ranked"
    cells = [c for c in result.entries("cells") if c["budget"] == 400 and c["event"] is None]
    assert {c["no_effect"] for c in cells if c["policy"] != "full"} == {True}
    assert "no effect" in printed(replay_table(result), 200)


@pytest.mark.parametrize("width", [80, 100, 120, 200])
def test_tables_fit_the_width(result: Result, width: int) -> None:
    text = printed([*replay_table(result, width), *ages_tables(result, width, by_layer=True)], width)
    lines = text.splitlines()
    assert max(len(line) for line in lines) <= width
    for word in ("every:8", "prompt-end", "at equal mean cache", "over time", "times on this machine", "ages of what"):
        assert word in text
    assert "cache" in text
    assert not re.findall(r"[^ ]…", "".join(line for line in lines if line.startswith("│")))  # nothing is cut short


def test_single_events_print_as_before() -> None:
    once = replay(TINY, ["h2o"], budgets=[24], window=4)
    text = printed(replay_table(once), 200)
    assert "regret" in text
    assert not [word for word in ("cache mean", "over time", "schedule", "on this machine") if word in text]


def test_ages_weight_tokens_and_survival_pools_what_was_at_risk(result: Result) -> None:
    line = next(a for a in age_lines(result) if (a.policy, a.schedule, a.asked) == ("h2o", "every:8", "budget 24"))
    mine = [
        e
        for e in result.entries("ages")
        if (e["policy"], e["schedule"], e["budget"]) == ("h2o", "every:8", 24) and e["event"] is not None
    ]
    kept = sum(e["kept_tokens"] for e in mine)
    median = sum(e["kept_age_p50"] * e["kept_tokens"] for e in mine if e["kept_tokens"]) / kept
    assert line.median == pytest.approx(median, rel=1e-13)
    assert line.oldest == max(e["kept_age_max"] for e in mine)
    assert sum(line.histogram) == kept
    pooled = sum(e["pool_tokens"] for e in mine)
    assert line.turnover == pytest.approx((pooled - kept) / pooled, rel=1e-13)
    # Survival once more from the decisions: prompt tokens of all heads, each with its exposures in order.
    shown = age_lines(result, by_layer=True)
    assert {a.layer for a in shown} == {0, 3, 5}
    assert line.survival["prompt"][2] is not None
    assert line.survival["prompt"][0] >= line.survival["prompt"][1] >= line.survival["prompt"][2]  # type: ignore[operator]
    risk, left = 0, 0.0
    for end in (e for e in result.entries("ages") if e["event"] is None):
        if (end["policy"], end["schedule"], end["budget"]) == ("h2o", "every:8", 24) and end["survival_prompt"]:
            risk += end["survival_prompt_at_risk"][0]
            left += end["survival_prompt_at_risk"][0] * (1 - end["survival_prompt"][0])
    assert line.survival["prompt"][0] == pytest.approx(1 - left / risk, rel=1e-12)
