"""Behaviour against numerics: by hand, and on replays that really differ."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from planted import TINY, tiny, where, with_value

from kvtool.compare import diff
from kvtool.compare.ties import Cuts, in_ties
from kvtool.replay import replay
from kvtool.result import Result

SMOLLM2 = TINY.with_name("smollm2.zarr")


def steps(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


@pytest.mark.parametrize(
    ("a", "b", "near_a", "near_b", "tie"),
    [
        # one token changed sides with one other, both near the cut
        (steps(9, 4, 9, 9), steps(4, 9, 9, 9), {4: 2}, {4: 2}, True),
        # the same with nothing near the cut in B, or in A, or with one token only
        (steps(9, 4, 9, 9), steps(4, 9, 9, 9), {4: 2}, {4: 0}, False),
        (steps(9, 4, 9, 9), steps(4, 9, 9, 9), {4: 0}, {4: 2}, False),
        (steps(9, 4, 9, 9), steps(4, 9, 9, 9), {4: 1}, {4: 1}, False),
        # two tokens against two with three near
        (steps(9, 9, 4, 4), steps(4, 4, 9, 9), {4: 3}, {4: 4}, False),
        (steps(9, 9, 4, 4), steps(4, 4, 9, 9), {4: 4}, {4: 4}, True),
        # another number kept is never a tie
        (steps(9, 4, 9, 9), steps(4, 4, 9, 9), {4: 4}, {4: 4}, False),
        # what follows from a tie at the first event is one too
        (steps(9, 4, 6, 9), steps(4, 9, 9, 6), {4: 2, 6: 0}, {4: 2, 6: 0}, True),
        # the first event agrees and the second does not
        (steps(4, 9, 6, 9), steps(4, 9, 9, 6), {4: 2, 6: 0}, {4: 2, 6: 0}, False),
        (steps(4, 9, 6, 9), steps(4, 9, 9, 6), {4: 0, 6: 2}, {4: 0, 6: 2}, True),
        # B has no event there
        (steps(9, 4, 9, 9), steps(9, 9, 6, 9), {4: 2}, {6: 2}, False),
    ],
)
def test_ties_by_hand(a: np.ndarray, b: np.ndarray, near_a: dict[int, int], near_b: dict[int, int], tie: bool) -> None:
    assert in_ties(a, b, Cuts(near_a), Cuts(near_b)) is tie
    assert in_ties(b, a, Cuts(near_b), Cuts(near_a)) is tie


def test_exact_ties_on_both_sides_are_no_matter_of_rounding() -> None:
    a, b = steps(9, 4, 9, 9), steps(4, 9, 9, 9)
    exact, near = Cuts.of([4], [3], [3]), Cuts.of([4], [3], [2])
    assert not in_ties(a, b, exact, exact)
    assert in_ties(a, b, exact, near)
    assert in_ties(a, b, near, exact)
    assert in_ties(a, b, exact, Cuts.of([4], [0], [0]), coarser="a")


def test_the_coarser_precision_alone_says_how_far_rounding_reaches() -> None:
    a, b = steps(9, 4, 9, 9), steps(4, 9, 9, 9)
    assert in_ties(a, b, Cuts({4: 2}), Cuts({4: 0}), coarser="a")
    assert not in_ties(a, b, Cuts({4: 2}), Cuts({4: 0}), coarser="b")
    assert not in_ties(a, b, Cuts({4: 0}), Cuts({4: 2}), coarser="a")


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
        "keeps other tokens in layers 0,7 (12 of 12 KV heads); first: sequence 0 layer 0 head 0 loses token"
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
