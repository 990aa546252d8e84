"""What a result says of schedules: numbers that no companion changes, and no score where none was earned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from traces import write

from kvtool.errors import KvtoolError
from kvtool.replay import replay
from kvtool.replay.counts import stored
from kvtool.report.ages_summary import age_lines
from kvtool.report.summary import sections, verdicts
from kvtool.result import Result
from kvtool.trace.landmarks import check_landmarks

GRADIENTS = Path(__file__).resolve().parents[2] / "sample_traces" / "smollm2-gradients.zarr"


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("reported") / "run.zarr")


def run(path: Path, *schedules: str, budget: int = 4, **options: Any) -> Result:
    options = {"sinks": 0, "window": 0, "precision": "float64", **options}
    policies = options.pop("policies", ["h2o", "knorm"])
    return replay(path, policies, budgets=[budget], schedules=schedules, **options)


def of(result: Result, name: str, schedule: str) -> list[dict[str, Any]]:
    return [e for e in result.entries(name) if e["schedule"] == schedule]


def test_what_else_is_compared_changes_no_number(trace: Path) -> None:
    words = ("every:3", "every:2,from:5", "prompt-end", "high-water:9,from:3/after")
    together = run(trace, *words)
    for word in words:
        alone = run(trace, word)
        for name in ("cells", "layers", "rows", "ages", "evict_steps"):
            for one, other in zip(of(together, name, word), of(alone, name, word), strict=True):
                assert one.keys() == other.keys()
                for column, value in one.items():  # blocks of steps may begin elsewhere: rounding
                    near = pytest.approx(other[column], rel=1e-12) if isinstance(value, float) else other[column]
                    assert value == near, (word, name, column)
    (said,) = (w for w in together.warnings if "their own first event" in w)
    assert "every:2,from:5 from step 5" in said


def test_counts_are_exact() -> None:
    assert int(stored({"evicted": 2**24 + 1})["evicted"]) == 2**24 + 1


def test_events_of_a_shared_cache_are_the_donors(trace: Path) -> None:
    """Layer 8 sees six rows of the cache of layer 2; what leaves that cache is told alike in both."""
    result = run(trace, "every:8,from:5", budget=12)
    names = ("candidates_max", "achieved_max", "evicted", "cache_before", "cache_after", "pages_held", "fragmentation")
    events = result.entries("events")
    own = [e for e in events if e["layer"] == 2]
    shared = [e for e in events if e["layer"] == 8]
    assert [[e[name] for name in names] for e in own] == [[e[name] for name in names] for e in shared]
    assert any(e["evicted"] > 0 for e in own)
    assert all(e["cache_after"] == e["cache_before"] - e["evicted"] >= 0 for e in events)


def test_turnover_counts_every_event_also_those_that_have_no_entry(tmp_path: Path) -> None:
    path = write(tmp_path / "long.zarr", lengths=(120,), layers=(2,), prompts=(20,))
    result = run(path, "every:1", budget=6)
    told = [e for e in result.entries("ages") if e["policy"] == "h2o" and e["event"] is not None and e["kv_head"] == 0]
    assert len(told) == 64
    line = next(line for line in age_lines(result) if line.policy == "h2o")
    # 20 candidates at first, then seven at each of the 99 events that follow
    assert line.turnover == pytest.approx((14 + 99) / (20 + 99 * 7), rel=1e-12)


def test_a_deadline_spares_the_controls_and_no_window_is_ranked_as_a_policy(trace: Path) -> None:
    free, late = run(trace, "every:2"), run(trace, "every:2", deadline_ms=1e-6)
    for policy in ("random", "full"):
        chosen = [[e["digest"] for e in r.entries("evict_steps") if e["policy"] == policy] for r in (free, late)]
        assert chosen[0] == chosen[1]
    cells = {e["policy"]: e for e in late.entries("cells") if e["sequence"] is None and e["event"] is None}
    assert {name: cell["window_decided"] for name, cell in cells.items()} == {
        "h2o": True,
        "knorm": True,
        "random": False,
        "full": False,
    }
    (section,) = sections(late)
    assert section.winner is None
    assert "the sliding window decided every event" in verdicts(late)[0]
    assert not any(e["window_decided"] for e in free.entries("cells"))


def test_a_cell_without_effect_has_no_score_anywhere(trace: Path) -> None:
    result = run(trace, "every:2", budget=100)
    for name in ("cells", "timeline"):
        mine = [e for e in result.entries(name) if e["policy"] == "knorm"]
        assert mine
        for entry in mine:
            assert entry["mean_layer_error"] is None
            assert entry.get("mean_output_error") is None
    assert all(e["no_effect"] for e in result.entries("cells") if e["policy"] == "knorm")


def test_regret_needs_an_order_of_tokens(trace: Path) -> None:
    pages, tokens = run(trace, "prompt-end/block:4"), run(trace, "prompt-end")
    assert {e["mass_regret"] for e in pages.entries("rows") if e["policy"] == "knorm"} == {None}
    assert all(e["mass_regret"] >= 1 for e in tokens.entries("rows") if e["policy"] == "knorm" and e["layer"] == 2)


def test_a_mark_leaves_room_for_a_page(trace: Path) -> None:
    with pytest.raises(KvtoolError, match="leaves no room for a page of 16 tokens") as caught:
        run(trace, "high-water:10,from:0/block:16")
    assert caught.value.code == "usage"
    roomy = run(trace, "high-water:12,from:0/block:8", policies=["knorm"])
    peaks = [e["peak_cache_tokens"] for e in roomy.entries("layers") if e["policy"] == "knorm" and e["event"] is None]
    assert max(peaks) == 12


def test_protection_that_exceeds_the_budget_says_at_how_many_events(trace: Path) -> None:
    result = replay(trace, ["knorm"], ratios=["0.5"], schedules=["every:4,from:4"], sinks=0, window=4, layers=[2])
    (said,) = (w for w in result.warnings if "protection exceeds" in w)
    assert "at 4 of " in said  # 4 and 8 candidates keep 2 and 4: only the first of them is too few, in two sequences
    result = run(trace, "every:4,from:4/block:8", budget=2, layers=[2])
    assert not any("protection exceeds" in w for w in result.warnings)
    assert any("so does the page being filled" in w for w in result.warnings)


def test_every_event_says_what_its_own_prediction_leaves_out() -> None:
    result = replay(GRADIENTS, ["knorm"], budgets=[64], schedules=["every:40,from:200"], layers=None)
    cells = {
        e["event"]: e["predicted_kl_partial"]
        for e in result.entries("cells")
        if e["policy"] == "knorm" and e["sequence"] == 0
    }
    assert "gradients start at step 256" in cells[None]
    assert "gradients start at step 256" in cells[200]
    assert cells[280] is None


@pytest.mark.parametrize("name", ["a\x1b[31mb", "a\nb", "a\u202eb"])
def test_a_landmark_cannot_speak_to_a_terminal(name: str) -> None:
    with pytest.raises(KvtoolError, match="not printable") as caught:
        check_landmarks({name: [1]}, "sequence 0", 5)
    assert caught.value.code == "trace-unsafe"
