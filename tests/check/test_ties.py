"""Ties hide no change: only what rounding can have parted passes, by the rule that `kvtool diff` has."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvtool.check import Check, check
from kvtool.cli.main import run
from kvtool.policies.knorm import KNorm
from kvtool.view import View

from .conftest import Suite

KNORM = "knorm @0.5 prompt-end sequence 0"
SEQUENCE = '[[jobs]]\nname = "one"\npolicies = ["knorm"]\nmetrics = ["mean_output_error"]\n'
LOOSE = "[tolerances]\ndefault = {relative = 1e6, absolute = 1e6}\n"
Scores = Callable[[Tensor, View], Tensor]


def spread(scores: Tensor, view: View) -> Tensor:
    return scores.double()


def five_levels(scores: Tensor, view: View) -> Tensor:
    return (view.tokens.double() * 7 % 5).expand(scores.shape)


def odd_rows_reversed(scores: Tensor, view: View) -> Tensor:
    levels = five_levels(scores, view)
    return torch.where(view.tokens % 2 == 1, 4 - levels, levels)


def negated(change: Scores) -> Scores:
    return lambda scores, view: -change(scores, view)


def mostly_lost(scores: Tensor, view: View) -> Tensor:
    """60 % of the tokens score minus infinity, so that the cut runs through them."""
    return torch.where(view.tokens % 5 < 3, -torch.inf, scores.double())


def mostly_lost_and_others(scores: Tensor, view: View) -> Tensor:
    return torch.where(view.tokens % 5 > 1, -torch.inf, scores.double())


def near_pair(sign: float) -> Scores:
    """Rows in order, but for the two at the cut, which differ by less than rounding in one order or in the other."""

    def change(scores: Tensor, view: View) -> Tensor:
        # Row 0 is a sink and the last eight are the window: 55 of the 119 between them stay, from row 65 on.
        found = torch.where(view.tokens == 64, 65.0, view.tokens.double())
        return torch.where(view.tokens == 65, 65.0 + sign * 1e-12, found).expand(scores.shape)

    return change


def two_far_pairs_exchanged(scores: Tensor, view: View) -> Tensor:
    """The near ties stay at the cut, and four tokens far from it change sides."""
    found = near_pair(1)(scores, view)
    far = torch.isin(view.tokens, torch.tensor([30, 31, 70, 71]))
    return torch.where(far, 101.0 - view.tokens.double(), found)


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> Callable[[Scores], None]:
    """Replace what `knorm` scores."""
    score = KNorm.score
    return lambda change: monkeypatch.setattr(
        KNorm, "score", lambda self, state, view: change(score(self, state, view), view)
    )


def layers(found: Check) -> dict[int, tuple[str, tuple[int, ...]]]:
    (row,) = (row for row in found.jobs[0].rows if row.name == KNORM)
    return {one.layer: (one.outcome, one.kv_heads) for one in row.layers}


def baseline(path: Path) -> dict[str, Any]:
    return json.loads((path.parent / "check.json").read_text())["jobs"]["one"]["decisions"][f"{KNORM} layer 3"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (five_levels, odd_rows_reversed),
        (five_levels, negated(five_levels)),
        (spread, negated(spread)),
        (mostly_lost, mostly_lost_and_others),
        (mostly_lost, spread),
        (spread, mostly_lost),
        (near_pair(1), negated(near_pair(1))),
        (near_pair(1), spread),
        (near_pair(1), two_far_pairs_exchanged),
    ],
    ids=[
        "odd rows",
        "levels negated",
        "negated",
        "others lost",
        "none lost",
        "lost",
        "near ties negated",
        "others",
        "far",
    ],
)
def test_what_rounding_cannot_do_is_behaviour_whatever_the_tolerances(
    suite: Suite, scored: Callable[[Scores], None], before: Scores, after: Scores
) -> None:
    path = suite(LOOSE, jobs=SEQUENCE)
    scored(before)
    check(path, update=True)
    assert check(path, strict=True).kind == "identical"
    scored(after)
    found = check(path)
    assert (found.ok, found.kind) == (False, "behaviour")
    assert layers(found) == dict.fromkeys((0, 3), ("moved", (0, 1)))
    assert run(["check", str(path)]) == 1


def test_two_near_tied_tokens_that_change_places_are_a_tie(suite: Suite, scored: Callable[[Scores], None]) -> None:
    path = suite(LOOSE, jobs=SEQUENCE)
    scored(near_pair(1))
    check(path, update=True)
    scored(near_pair(-1))
    found = check(path, strict=True)
    assert (found.ok, found.kind) == (True, "numerics")
    assert layers(found) == dict.fromkeys((0, 3), ("tie", (0, 1)))
    scored(near_pair(0))  # as a machine would have it whose sums happen to be equal: the newer token stays
    assert layers(check(path)) == dict.fromkeys((0, 3), ("same", ()))


def test_a_tie_lets_no_other_head_pass(suite: Suite, scored: Callable[[Scores], None]) -> None:
    path = suite(LOOSE, jobs=SEQUENCE)
    scored(near_pair(1))
    check(path, update=True)
    side = torch.tensor([[1.0], [0.0]], dtype=torch.float64)
    scored(lambda s, view: side * near_pair(-1)(s, view) + (1 - side) * near_pair(1)(s, view).flip(-1))
    assert layers(check(path)) == dict.fromkeys((0, 3), ("moved", (0, 1)))


@pytest.mark.parametrize(
    ("scores", "kept"), [(near_pair(1), {"0", "1"}), (five_levels, set()), (mostly_lost, set()), (spread, set())]
)
def test_cuts_are_kept_where_rounding_could_turn_them_and_nowhere_else(
    suite: Suite, scored: Callable[[Scores], None], scores: Scores, kept: set[str]
) -> None:
    path = suite(jobs=SEQUENCE)
    scored(scores)
    check(path, update=True)
    layer = baseline(path)
    assert set(layer.get("cuts", {})) == kept
    assert layer["kept"] == [64 + 32, 64 + 32]
    raw = (path.parent / "check.json").read_bytes()
    check(path, update=True)
    assert (path.parent / "check.json").read_bytes() == raw
