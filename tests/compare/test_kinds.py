"""Behaviour against numerics: by hand, and on replays that really differ."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from planted import TINY, tiny, where, with_value

from kvtool.compare import diff
from kvtool.compare.ties import Cuts, in_ties
from kvtool.errors import KvtoolError
from kvtool.replay import replay
from kvtool.result import Result

SMOLLM2 = TINY.with_name("smollm2.zarr")


Near = dict[int, list[int]]


def cuts(near: Near) -> Cuts:
    return Cuts({step: frozenset(rows) for step, rows in near.items()})


def steps(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


@pytest.mark.parametrize(
    ("a", "b", "near_a", "near_b", "tie"),
    [
        # tokens 0 and 1 changed sides, both near the cut
        (steps(9, 4, 9, 9), steps(4, 9, 9, 9), {4: [0, 1]}, {4: [0, 1]}, True),
        # the same with nothing near the cut in B, or in A, or with one token only
        (steps(9, 4, 9, 9), steps(4, 9, 9, 9), {4: [0, 1]}, {4: []}, False),
        (steps(9, 4, 9, 9), steps(4, 9, 9, 9), {4: []}, {4: [0, 1]}, False),
        (steps(9, 4, 9, 9), steps(4, 9, 9, 9), {4: [1]}, {4: [1]}, False),
        # as many near ties, but others
        (steps(9, 4, 9, 9), steps(4, 9, 9, 9), {4: [0, 2]}, {4: [0, 2]}, False),
        # two tokens against two with three near
        (steps(9, 9, 4, 4), steps(4, 4, 9, 9), {4: [0, 1, 2]}, {4: [0, 1, 2, 3]}, False),
        (steps(9, 9, 4, 4), steps(4, 4, 9, 9), {4: [0, 1, 2, 3]}, {4: [0, 1, 2, 3]}, True),
        # another number kept is never a tie
        (steps(9, 4, 9, 9), steps(4, 4, 9, 9), {4: [0, 1, 2, 3]}, {4: [0, 1, 2, 3]}, False),
        # what follows from a tie at the first event is one too
        (steps(9, 4, 6, 9), steps(4, 9, 9, 6), {4: [0, 1], 6: []}, {4: [0, 1], 6: []}, True),
        # the first event agrees and the second does not
        (steps(4, 9, 6, 9), steps(4, 9, 9, 6), {4: [2, 3], 6: []}, {4: [2, 3], 6: []}, False),
        (steps(4, 9, 6, 9), steps(4, 9, 9, 6), {4: [], 6: [2, 3]}, {4: [], 6: [2, 3]}, True),
        # B has no event there
        (steps(9, 4, 9, 9), steps(9, 9, 6, 9), {4: [1, 2]}, {6: [1, 2]}, False),
    ],
)
def test_ties_by_hand(a: np.ndarray, b: np.ndarray, near_a: Near, near_b: Near, tie: bool) -> None:
    assert in_ties(a, b, cuts(near_a), cuts(near_b)) is tie
    assert in_ties(b, a, cuts(near_b), cuts(near_a)) is tie


def test_exact_ties_on_both_sides_are_no_matter_of_rounding() -> None:
    a, b = steps(9, 4, 9, 9), steps(4, 9, 9, 9)
    exact, near = Cuts.of([4], [3], [3], [0, 1, 2]), Cuts.of([4], [3], [2], [0, 1, 2])
    assert not in_ties(a, b, exact, exact)
    assert in_ties(a, b, exact, near)
    assert in_ties(a, b, near, exact)
    assert in_ties(a, b, exact, Cuts.of([4], [0], [0], []), coarser="a")


def test_the_coarser_precision_alone_says_how_far_rounding_reaches() -> None:
    a, b = steps(9, 4, 9, 9), steps(4, 9, 9, 9)
    assert in_ties(a, b, cuts({4: [0, 1]}), cuts({4: []}), coarser="a")
    assert not in_ties(a, b, cuts({4: [0, 1]}), cuts({4: []}), coarser="b")
    assert not in_ties(a, b, cuts({4: []}), cuts({4: [0, 1]}), coarser="a")


def planted_tie(near: int) -> tuple[Result, Result]:
    """One token of one head changed sides, with `near` tokens near the cut in both results."""
    a = tiny()
    (row,) = where(a, "evict_steps", policy="h2o", ratio=0.5, sequence=0, layer=0, kv_head=1)
    before = a.tables["evict_steps"].column("evict_step")[row].as_py()
    (event,) = a.tables["evict_steps"].column("event_steps")[row].as_py()
    kept = next(token for token in range(30, event) if before[token] == len(before))
    gone = next(token for token in range(event) if before[token] == event)
    after = list(before)
    after[kept], after[gone] = event, len(before)
    a = with_value(a, "evict_steps", "event_near_ties", row, [near])
    a = with_value(a, "evict_steps", "near_rows", row, [kept, gone, *range(near)][:near])
    return a, with_value(a, "evict_steps", "evict_step", row, after)


def test_a_tie_is_numerics_and_counted() -> None:
    found = diff(*planted_tie(2))
    assert (found.kind, found.document()["ties"], found.worse) == ("numerics", 1, False)
    assert found.findings == [found.findings[0]]
    assert found.findings[0].startswith("numerics: h2o @0.5 keeps other tokens only where rounding decides (1 of 12")
    assert found.groups[0]["kept"]["heads_moved"] == 1


def test_the_same_swap_without_near_ties_is_behaviour() -> None:
    found = diff(*planted_tie(1))
    assert (found.kind, found.document()["ties"]) == ("behaviour", 0)


def test_results_that_know_no_margins_say_so() -> None:
    a, b = planted_tie(2)
    for side in (a, b):
        side.tables["evict_steps"] = side.tables["evict_steps"].drop_columns(["event_near_ties"])
    found = diff(a, b)
    assert found.kind == "behaviour"
    assert "how close their cuts were" in found.warnings[0]


@pytest.mark.parametrize("ratio", ["0.5", "0.9"])
def test_another_precision_is_numerics(ratio: str) -> None:
    a, b = (replay(SMOLLM2, ["snapkv", "knorm"], ratios=[ratio], precision=p) for p in ("float64", "float32"))
    found = diff(a, b)
    assert found.kind == "numerics"
    assert not found.worse
    assert [one["name"] for one in found.settings] == ["replay.precision"]
    back = diff(b, a)
    assert (back.kind, back.worse) == ("numerics", False)


FLIPPED = """
from dataclasses import dataclass
from kvtool.policies.knorm import KNorm

@dataclass(frozen=True)
class Flipped(KNorm):
    def score(self, state, view):
        return -super().score(state, view)
"""


def test_a_flipped_sign_is_behaviour_with_layers_and_first_tokens(tmp_path: Path) -> None:
    (tmp_path / "flipped.py").write_text(FLIPPED)
    word = f"{tmp_path / 'flipped.py'}:Flipped"
    a, b = (replay(SMOLLM2, [policy], ratios=["0.5"], layers=[0, 7]) for policy in ("knorm", word))
    found = diff((a, "knorm"), (b, word), tokens=3)
    assert (found.kind, found.worse) == ("behaviour", True)
    assert (
        "keeps other tokens in layers 0,7 (12 of 12 KV heads); first: sequence 0, layer 0, KV head 0 loses token"
        in (found.findings[0])
    )
    (group,) = found.groups
    assert group["tokens"]["lost"][0]["text"]
    assert group["tokens"]["lost"][0]["damage"] > 0
    assert len({entry["sequence"] for entry in group["tokens"]["lost"]}) == 2
    assert group["kept"]["jaccard"] < 0.5
    names = [one["name"] for one in found.settings]
    assert names[:3] == ["policy", "policy.class", "policy.source"]


def test_a_window_off_by_one_is_behaviour_and_the_first_setting() -> None:
    a, b = (replay(SMOLLM2, ["knorm"], ratios=["0.75"], window=w, layers=[0, 7]) for w in (32, 31))
    found = diff((a, "knorm"), (b, "knorm"))
    assert found.settings[0]["name"] == "replay.window"
    assert found.kind == "behaviour"
    # the oldest row of the window of 32 rows before the event at 512 is what the shorter one gives up
    assert "loses token 480" in found.findings[0]


MOVED = """
from dataclasses import dataclass

import torch

from kvtool.policies.knorm import KNorm


@dataclass(frozen=True)
class Narrow(KNorm):
    def score(self, state, view):
        return super().score(state, view).to(torch.bfloat16).to(view.dtype)


@dataclass(frozen=True)
class Reordered(KNorm):
    def score(self, state, view):
        scores = super().score(state, view)
        generator = torch.Generator().manual_seed(0)
        return scores * (1 + 4.5e-6 * (2 * torch.rand(scores.shape, generator=generator, dtype=scores.dtype) - 1))
"""


@pytest.mark.parametrize(("name", "kind"), [("Narrow", "behaviour"), ("Reordered", "numerics")])
def test_a_downcast_is_behaviour_and_another_order_of_sums_is_not(tmp_path: Path, name: str, kind: str) -> None:
    (tmp_path / "moved.py").write_text(MOVED)
    word = f"{tmp_path / 'moved.py'}:{name}"
    ratios = [f"0.{percent}" for percent in range(30, 90, 3)]  # so many cuts that some fall between near ties
    a, b = (replay(SMOLLM2, [policy], ratios=ratios, layers=[0]) for policy in ("knorm", word))
    found = diff((a, "knorm"), (b, word), tokens=0)
    assert found.kind == kind
    assert (found.document()["ties"] > 0) or kind == "behaviour"


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ({"policies": ["scissorhands:history=4"]}, {"policies": ["scissorhands:history=5"]}),
        ({"policies": ["scissorhands:history=4"], "sinks": 4}, {"policies": ["scissorhands:history=4"], "sinks": 2}),
    ],
)
def test_counts_that_tie_everywhere_hide_no_change_of_behaviour(one: dict[str, Any], two: dict[str, Any]) -> None:
    a, b = (replay(SMOLLM2, ratios=["0.1", "0.5"], layers=[0, 15], **options) for options in (one, two))
    found = diff((a, "scissorhands"), (b, "scissorhands"), tokens=0)
    assert {group["kind"] for group in found.groups} == {"behaviour"}


def test_near_ties_that_do_not_fit_their_events_are_damage() -> None:
    a, b = planted_tie(2)
    row = where(b, "evict_steps", policy="h2o", ratio=0.5, sequence=0, layer=0, kv_head=1)[0]
    for column, value in (("event_near_ties", [2, 1]), ("near_rows", [3]), ("event_ties", [])):
        with pytest.raises(KvtoolError, match="near ties that do not fit") as caught:
            diff(a, with_value(b, "evict_steps", column, row, value))
        assert caught.value.code == "result-damaged"


def test_kept_sets_of_windowed_layers_are_what_is_still_seen_without_the_trace() -> None:
    a = replay(TINY, ["snapkv:window=8", "tova"], ratios=["0.75"], sinks=1, window=8, layers=[5])
    manifest = {**a.manifest, "trace": {**a.manifest["trace"], "path": "gone.zarr"}}
    sides = [(Result(manifest, a.tables), policy) for policy in ("snapkv", "tova")]
    (group,) = diff(*sides).groups
    length, window, step = 160, 48, 128
    expected = []
    for sequence, head in itertools.product(range(2), range(2)):
        kept = []
        for policy in ("snapkv:window=8", "tova"):
            (row,) = where(a, "evict_steps", policy=policy, sequence=sequence, kv_head=head)
            leaves = a.tables["evict_steps"].column("evict_step")[row].as_py()
            kept.append({p for p in range(step - window + 1, step) if leaves[p] == length})
        expected.append(len(kept[0] & kept[1]) / len(kept[0] | kept[1]))
    assert group["kept"]["jaccard"] == pytest.approx(sum(expected) / len(expected), abs=1e-12)
