"""The small ends: nothing to evict, nothing but protection, one token, events that never come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from traces import write

from kvtool.errors import KvtoolError
from kvtool.replay import replay
from kvtool.result import Result


def run(path: Path, policies: list[str], word: str, budget: int = 4, sinks: int = 0, window: int = 0) -> Result:
    return replay(path, policies, budgets=[budget], schedules=[word], sinks=sinks, window=window, precision="float64")


def entries(result: Result, name: str, policy: str) -> list[dict[str, Any]]:
    return [entry for entry in result.entries(name) if entry["policy"] == policy and entry["event"] is None]


def kept(result: Result, policy: str, sequence: int, layer: int) -> list[list[int]]:
    """Per KV head the `evict_step` of every row."""
    found = [
        e
        for e in result.entries("evict_steps")
        if (e["policy"], e["sequence"], e["layer"]) == (policy, sequence, layer)
    ]
    return [entry["evict_step"] for entry in sorted(found, key=lambda entry: entry["kv_head"])]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("ends") / "run.zarr", layers=(2, 5))


@pytest.mark.parametrize("word", ["every:1,from:1000", "high-water:900", "every:7,from:26/after"])
def test_an_event_that_never_comes_is_said(trace: Path, word: str) -> None:
    result = run(trace, ["knorm", "h2o"], word)
    for policy in ("knorm", "h2o"):
        for entry in entries(result, "cells", policy):
            assert (entry["events"], entry["evicted"], entry["no_effect"]) == (0, 0, True)
            assert entry["mean_output_error"] is None  # what a full cache scores is no score of the policy
    (said,) = result.warnings
    assert f"{word}: every policy had no effect in 4 of 4" in said
    assert said.endswith("the schedule never made an event due")


def test_events_with_nothing_to_evict_are_said(trace: Path) -> None:
    result = run(trace, ["knorm"], "every:2", budget=50)
    assert [entry["no_effect"] for entry in entries(result, "cells", "knorm")] == [True] * 3
    assert entries(result, "cells", "knorm")[0]["events"] == 4
    (said,) = result.warnings
    assert said.endswith("the budget covers every candidate")


def test_a_page_larger_than_the_sequence_never_leaves(trace: Path) -> None:
    result = run(trace, ["knorm"], "every:1/block:500")
    assert all(entry["no_effect"] for entry in entries(result, "layers", "knorm"))
    assert any("no page could leave as a whole" in said for said in result.warnings)
    assert not any("covers every candidate" in said for said in result.warnings)


@pytest.mark.parametrize("word", ["every:1,from:0", "prefill:3", "high-water:9,from:0"])
@pytest.mark.parametrize(("sinks", "window"), [(4, 4), (3, 99)])
def test_protection_beyond_the_budget_keeps_sinks_then_the_newest(
    trace: Path, word: str, sinks: int, window: int
) -> None:
    result = run(trace, ["knorm", "h2o"], word, budget=4, sinks=sinks, window=window)
    sets = [kept(result, policy, 0, 2) for policy in ("knorm", "h2o")]
    assert sets[0] == sets[1]  # scores decide nothing
    assert all(head[: min(sinks, 4)] == [26] * min(sinks, 4) for head in sets[0])
    assert any("protection exceeds the budget of 4 tokens" in said for said in result.warnings)


def test_a_delay_longer_than_the_sequence_leaves_a_sliding_window(trace: Path) -> None:
    result = run(trace, ["knorm"], "every:1/delay:500", sinks=1)
    for head in kept(result, "knorm", 0, 2):
        assert [row for row in range(18) if head[row] > 18] == [0, 15, 16, 17]
    assert "protection exceeds the budget" in result.warnings[0]


@pytest.mark.parametrize("word", ["every:1", "every:1,from:0", "prompt-end", "prefill:1"])
def test_a_prompt_of_one_token(tmp_path: Path, word: str) -> None:
    path = write(tmp_path / "one.zarr", layers=(2, 5), lengths=(12,), prompts=(1,))
    result = run(path, ["h2o", "snapkv:window=2", "jacap"], word, budget=1)
    for policy in ("h2o", "snapkv:window=2", "jacap"):
        (entry,) = (e for e in entries(result, "layers", policy) if e["layer"] == 2)
        assert entry["events"] == (11 if word.startswith("every") else 1)
        assert entry["evicted"] == (20 if word.startswith("every") else 0)  # 2 KV heads, 10 events that evict one


@pytest.mark.parametrize("word", ["every:1,from:0", "prompt-end", "high-water:2,from:0", "prefill:1"])
def test_two_tokens(tmp_path: Path, word: str) -> None:
    path = write(tmp_path / "two.zarr", layers=(2, 5), lengths=(2,), prompts=(1,))
    result = run(path, ["knorm", "h2o", "oracle-mass"], word, budget=1)
    assert {entry["output_error"] for entry in entries(result, "rows", "h2o")} == {0}
    for entry in entries(result, "cells", "h2o"):
        assert entry["no_effect"]
        assert entry["mean_output_error"] is None


def test_the_smallest_mark_keeps_one_token_and_the_query_its_own(trace: Path) -> None:
    result = run(trace, ["knorm"], "high-water:2,from:0", budget=1)
    for head in kept(result, "knorm", 0, 2):
        for t in range(26):
            assert sum(p <= t < head[p] for p in range(26)) <= 2


def test_the_start_of_a_chunk_has_no_candidates(trace: Path) -> None:
    result = run(trace, ["h2o", "tova", "snapkv:window=2", "oracle-caote"], "every:7,from:0", budget=1)
    for policy in ("h2o", "tova", "snapkv:window=2", "oracle-caote"):
        found = [e for e in result.entries("layers") if (e["policy"], e["layer"], e["sequence"]) == (policy, 5, 0)]
        assert {e["event"]: e["evicted"] for e in found} == {None: 0, 7: 0, 14: 0, 21: 0}
        assert all(e["candidates"] == 0 for e in found)


def test_sequences_of_different_length_have_events_of_their_own(trace: Path) -> None:
    found = run(trace, ["knorm"], "every:3").entries("layers")
    steps = {
        s: {e["event"] for e in found if (e["sequence"], e["policy"], e["layer"]) == (s, "knorm", 2)} for s in (0, 1)
    }
    assert steps == {0: {None, 18, 21, 24}, 1: {None, 11, 14, 17}}


def test_queries_of_the_decode_steps_serve_policies_that_read_none(tmp_path: Path) -> None:
    path = write(tmp_path / "decode.zarr", layers=(2, 5), lengths=(26,), first_query=None)
    whole = write(tmp_path / "whole.zarr", layers=(2, 5), lengths=(26,), first_query=0)
    policies = ["streaming-llm", "knorm", "keydiff", "oracle-mass"]
    found, reference = (run(one, policies, "every:2") for one in (path, whole))
    for policy in policies:
        assert kept(found, policy, 0, 2) == kept(reference, policy, 0, 2)
        assert entries(found, "cells", policy)[0]["mean_output_error"] > 0
    with pytest.raises(KvtoolError, match=r"h2o cannot be replayed: layer 2 holds 0 of the 18 queries"):
        run(path, ["h2o"], "every:2")
    with pytest.raises(KvtoolError, match="tova cannot be replayed"):
        run(path, ["tova"], "every:2")
    assert entries(run(path, ["tova"], "every:2/after"), "cells", "tova")[0]["evicted"] > 0


def test_a_prompt_that_is_the_whole_sequence(tmp_path: Path) -> None:
    path = write(tmp_path / "prompt.zarr", layers=(2, 5), lengths=(20,), prompts=(20,))
    for word in ("every:2,from:0", "prefill:5", "high-water:8,from:0"):
        assert entries(run(path, ["h2o"], word), "cells", "h2o")[0]["evicted"] > 0
    for word in ("every:2", "high-water:900,from:0"):
        with pytest.raises(KvtoolError, match="no event ever runs, and there is no query after the prompt"):
            run(path, ["h2o"], word)
    with pytest.raises(KvtoolError, match="the event at step 20 has no query after it"):
        run(path, ["h2o"], "prompt-end")


def test_a_prefix_is_never_evicted(trace: Path) -> None:
    for word in ("prompt-end", "every:2,from:0", "prefill:4"):
        result = replay(trace, ["knorm", "h2o"], budgets=[9], schedules=[word], prefix=7, sinks=1, window=1)
        for policy in ("knorm", "h2o"):
            assert all(head[:7] == [26] * 7 for head in kept(result, policy, 0, 2))
            assert any(step < 26 for head in kept(result, policy, 0, 2) for step in head)
