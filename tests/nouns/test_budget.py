"""Budgets are exact: the decimal that was typed decides, not its binary neighbour."""

from __future__ import annotations

from fractions import Fraction

import pytest

from kvtool.budget import Budget
from kvtool.errors import KvtoolError


@pytest.mark.parametrize(
    ("ratio", "candidates", "kept"),
    [
        ("0.8", 100, 20),  # int(100 * (1 - 0.8)) is 19
        ("0.9", 2048, 205),
        ("0.9", 1000, 100),  # int(1000 * (1 - 0.9)) is 99
        ("0.9", 10, 1),  # int(10 * (1 - 0.9)) is 0
        ("0.75", 512, 128),
        ("0", 7, 7),
        ("0.999999", 3, 1),
        ("0.5", 1, 1),
        ("0.5", 0, 0),
        (0.7, 10, 3),
        (Fraction(1, 3), 10, 7),
    ],
)
def test_ratio_rounds_as_written(ratio: str | float | Fraction, candidates: int, kept: int) -> None:
    assert Budget.from_ratio(ratio).resolve(candidates) == kept


def test_never_empty_for_any_ratio_below_one() -> None:
    for candidates in range(1, 300):
        for ratio in ("0.1", "0.3", "0.5", "0.9", "0.99", "0.999"):
            kept = Budget.from_ratio(ratio).resolve(candidates)
            exact = candidates - Fraction(ratio) * candidates
            assert 1 <= kept <= candidates
            assert exact <= kept < exact + 1


def test_count_and_ratio_agree() -> None:
    assert Budget.from_tokens(128).resolve(512) == Budget.from_ratio("0.75").resolve(512)
    assert Budget.from_tokens(128).resolve(100) == 100


@pytest.mark.parametrize("ratio", ["1.5", "1", "-0.1", "nan", "inf", "a half", ""])
def test_bad_ratio_is_refused(ratio: str) -> None:
    with pytest.raises(KvtoolError) as caught:
        Budget.from_ratio(ratio)
    assert caught.value.code == "usage"


@pytest.mark.parametrize("tokens", [0, -3])
def test_bad_count_is_refused(tokens: int) -> None:
    with pytest.raises(KvtoolError, match="keeps no token"):
        Budget.from_tokens(tokens)
