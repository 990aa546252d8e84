"""What is inside the four operations or a policy's score is counted once, as the outermost, generators included."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtool.bench import counted_replay
from kvtool.bench.counted_replay import OPERATIONS, Counter, import_everything, operation_of
from kvtool.bench.situation import Situation
from kvtool.bench.timing import OutOfTime, Stopwatch
from kvtool.bench.whole_replay import finished, share_outside

TINY = Path(__file__).resolve().parents[2] / "sample_traces" / "tiny-gqa.zarr"


class Ticking:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_nested_calls_belong_to_the_outermost() -> None:
    clock = Ticking()
    counter = Counter(clock)

    def inner() -> str:
        clock.now += 1
        return "found"

    counted_inner = counter.around("leverage", inner)

    def outer() -> str:
        clock.now += 2
        return counted_inner()

    assert counter.around("score", outer)() == "found"
    assert counter.seconds == {"score": 3.0}
    counted_inner()
    assert counter.seconds == {"score": 3.0, "leverage": 1.0}


def test_a_generator_is_counted_while_it_works_and_not_while_it_waits() -> None:
    clock = Ticking()
    counter = Counter(clock)

    def blocks() -> Iterator[int]:
        for i in range(3):
            clock.now += 5
            yield i

    seen = []
    for block in counter.around("retained_attention", blocks)():
        clock.now += 100
        seen.append(block)
    assert seen == [0, 1, 2]
    assert counter.seconds == {"retained_attention": 15.0}


def test_an_error_passes_and_counting_goes_on() -> None:
    clock = Ticking()
    counter = Counter(clock)

    def broken() -> None:
        clock.now += 1
        raise ValueError("broken")

    counted = counter.around("score", broken)
    for _ in range(2):
        with pytest.raises(ValueError, match="broken"):
            counted()
    assert counter.seconds == {"score": 2.0}


def test_every_operation_is_found_where_kvtool_calls_it() -> None:
    found = {operation_of(value) for module in import_everything() for value in vars(module).values()}
    assert found - {None} == set(OPERATIONS)


def test_a_real_replay_is_counted_in_a_process_of_its_own(tmp_path: Path) -> None:
    here = Situation(Stopwatch(300.0), frozenset(), tmp_path)
    counts = tmp_path / "counts.json"
    command = ["-c", counted_replay.PROGRAM, str(counts), "--no-plugins", "replay", str(TINY)]
    finished([*command, "-p", "snapkv", "-p", "capkv", "-r", "0.5", "--layers", "0", "--threads", "1"], here)
    found = json.loads(counts.read_text())
    assert set(found["inside"]) <= {*OPERATIONS, "score"}
    assert {"retained_attention", "score"} <= set(found["inside"])
    assert all(seconds > 0 for seconds in found["inside"].values())
    with pytest.raises(RuntimeError, match="policy-unknown"):
        finished([*command, "-p", "nonsense"], here)
    with pytest.raises(OutOfTime):
        finished(["-c", "import time; time.sleep(30)"], Situation(Stopwatch(0.0), frozenset(), tmp_path))


def test_the_share_is_what_neither_operations_nor_scores_account_for() -> None:
    found = share_outside(10.0, {"score": 3.0, "leverage": 5.0}, 1.5, 100)
    assert found.ratio == pytest.approx(0.2)
    assert found.detail["seconds"]["elsewhere"] == pytest.approx(0.5)
    assert found.detail["seconds"]["total"] == 10.0


def test_calls_are_counted_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    import types

    from kvtool.kernels.leverage import leverage_scores

    module = types.ModuleType("somewhere")
    module.leverage_scores, module.other = leverage_scores, len  # type: ignore[attr-defined]
    monkeypatch.setattr("kvtool.policies.Policy", type("Alone", (), {}))
    counted_replay.count_calls(Counter(), [module])
    assert module.leverage_scores is not leverage_scores
    assert module.leverage_scores.__wrapped__ is leverage_scores
    assert module.other is len
