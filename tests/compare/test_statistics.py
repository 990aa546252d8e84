"""Intervals and tests over sequences: against their definitions, and where the data leave nothing to compute."""

from __future__ import annotations

import itertools
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from kvtool.compare.statistics import (
    COVERAGE,
    LAWS,
    RESAMPLES,
    SEED,
    coverage,
    holm,
    interval_entry,
    intervals,
    note,
    paired_p,
)


def closed_testing(p: list[float]) -> list[float]:
    """Holm's procedure as what it is: the closure of Bonferroni. A hypothesis falls if every set that holds it does."""
    adjusted = []
    for one in range(len(p)):
        sets = [s for size in range(1, len(p) + 1) for s in itertools.combinations(range(len(p)), size) if one in s]
        adjusted.append(max(min(1.0, len(s) * min(p[i] for i in s)) for s in sets))
    return adjusted


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.001, 0.01, 0.012, 0.02, 0.04, 0.3, 0.9, 1.0]), min_size=1, max_size=7))
def test_holm_is_the_closure_of_bonferroni(p: list[float]) -> None:
    np.testing.assert_allclose(holm(np.array(p)), closed_testing(p), rtol=1e-14)


def test_holm_by_hand_and_what_was_not_tested_stays_out() -> None:
    found = holm(np.array([0.01, np.nan, 0.04, 0.03]))
    np.testing.assert_allclose(found, [0.03, np.nan, 0.06, 0.06])
    assert holm(np.array([])).shape == (0,)
    assert np.isnan(holm(np.array([np.nan, np.nan]))).all()


def test_the_bootstrap_interval_is_the_percentiles_of_resampled_means() -> None:
    differences = np.array([[0.3, -0.1, 0.7, 0.2], [5.0, 5.5, 4.0, 9.0]])
    found = intervals(differences)
    draws = np.random.default_rng(SEED).integers(0, 4, (RESAMPLES, 4))
    means = differences[:, draws].mean(axis=-1)
    low, high = np.percentile(means, [2.5, 97.5], axis=1)
    np.testing.assert_allclose([found.low, found.high], [low, high], rtol=0.02)


def test_two_sequences_give_the_two_differences_and_every_order_the_same() -> None:
    found = intervals(np.array([[1.0, 3.0]]))
    assert (found.low[0], found.high[0]) == (1.0, 3.0)
    rows = np.random.default_rng(3).normal(size=(40, 5))
    whole, backwards = intervals(rows), intervals(rows[::-1])
    assert (whole.low == backwards.low[::-1]).all()
    assert (whole.high == np.array([intervals(row[None]).high[0] for row in rows])).all()


def test_students_interval_is_scipys() -> None:
    rows = np.random.default_rng(4).normal(0.3, 1.0, (6, 7))
    found = intervals(rows)
    low, high = stats.t.interval(0.95, 6, rows.mean(axis=1), stats.sem(rows, axis=1))
    np.testing.assert_allclose([found.t_low, found.t_high], [low, high], rtol=1e-9)


@pytest.mark.parametrize("count", [2, 3, 9])
@pytest.mark.parametrize("value", [0.0, 0.1, -3.7, 1e-320, 1e300])
def test_equal_differences_give_a_point_and_no_warning(count: int, value: float) -> None:
    rows = np.full((3, count), value)
    rows[1] = np.linspace(0, 1, count)  # one that is not degenerate beside them
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found, p = intervals(rows), paired_p(rows)
    for ends in (found.low, found.high, found.t_low, found.t_high):
        assert ends[0] == ends[2] == value
        assert not np.isnan(ends).any()
    assert p[0] == (1.0 if value == 0 else 0.0)
    assert bool(found.sure[0]) == (value != 0)


def test_one_sequence_has_no_interval_and_says_so() -> None:
    found = intervals(np.array([[2.0], [3.0]]))
    assert np.isnan([found.low, found.high, found.t_low, found.t_high]).all()
    assert not found.sure.any()
    assert np.isnan(paired_p(np.array([[2.0]]))).all()
    assert interval_entry(1) is None
    assert "no interval" in note(1)
    assert interval_entry(0) is None


def test_sure_needs_both_intervals() -> None:
    found = intervals(np.array([[1.0, 3.0], [1.0, 1.001], [-2.0, -2.001], [-1.0, 2.0]]))
    assert found.low[0] > 0 > found.t_low[0]
    assert found.sure.tolist() == [False, True, True, False]


def test_paired_p_is_the_t_test() -> None:
    rows = np.random.default_rng(5).normal(0.5, 1.0, (8, 5))
    t = rows.mean(axis=1) / (rows.std(axis=1, ddof=1) / np.sqrt(5))
    np.testing.assert_allclose(paired_p(rows), 2 * stats.t.sf(np.abs(t), 4), rtol=1e-12)


def test_the_note_speaks_of_the_number_of_sequences() -> None:
    assert coverage(1) is None
    assert coverage(5) == coverage(4)
    assert coverage(1000) == coverage(32)
    entry = interval_entry(4)
    assert entry is not None
    assert entry["coverage"] == min(COVERAGE[4][0]) < 0.8
    assert "68 to 81" in note(4)
    assert all(len(shares) == len(LAWS) for both in COVERAGE.values() for shares in both)
