"""Overlap of kept sets, against sets written down by hand."""

from __future__ import annotations

import pytest
import torch

from kvtool.compare.kept import HeadSets, overlap
from kvtool.errors import KvtoolError

TOKENS, EVENT = 12, 8


def head(a: dict[int, int], b: dict[int, int], *, layer: int = 0, kv_head: int = 0, **more: int) -> HeadSets:
    """`a` and `b` map an evicted row to the step of its eviction."""
    sides = [torch.tensor([gone.get(row, TOKENS) for row in range(TOKENS)], dtype=torch.int32) for gone in (a, b)]
    return HeadSets(more.pop("sequence", 0), layer, kv_head, *sides, EVENT, EVENT, **more)


def test_one_event_compares_the_candidates_that_stayed() -> None:
    found = overlap([head({0: EVENT, 1: EVENT, 2: EVENT}, {0: EVENT, 5: EVENT, 6: EVENT})])
    # A keeps 3 4 5 6 7, B keeps 1 2 3 4 7; rows 8 to 11 were never candidates
    assert found["jaccard"] == 3 / 7
    assert (found["kept_a"], found["kept_b"]) == (5, 5)
    assert found["by_layer"] == [{"layer": 0, "jaccard": 3 / 7, "jaccard_min": 3 / 7, "moved_tokens": 4}]
    assert (found["heads"], found["heads_moved"]) == (1, 1)


def test_equal_and_untouched_heads_overlap_wholly() -> None:
    same = {1: EVENT, 2: EVENT}
    found = overlap([head(same, same), head({}, {}, kv_head=1)])
    assert (found["jaccard"], found["jaccard_min"], found["heads_moved"]) == (1.0, 1.0, 0)
    assert found["kept_a"] == (6 + 8) / 2


def test_nothing_kept_on_either_side_is_the_same() -> None:
    everything = dict.fromkeys(range(EVENT), EVENT)
    assert overlap([head(everything, everything)])["jaccard"] == 1.0
    assert overlap([head(everything, {})])["jaccard"] == 0.0


def test_several_events_compare_what_is_left_behind_the_last() -> None:
    a = {0: 8, 1: 10}
    b = {0: 10, 1: 8}  # the same tokens, in another order
    found = overlap([head(a, b)])
    assert (found["jaccard"], found["heads_moved"]) == (1.0, 1)
    assert found["by_layer"][0]["moved_tokens"] == 0
    assert (found["kept_a"], found["kept_b"]) == (8, 8)  # rows 2 to 9
    # B's last event came later, and row 9 is a candidate of both
    assert overlap([head({0: 8}, {0: 8, 9: 11})])["jaccard"] == 9 / 10


def test_the_last_event_may_have_evicted_nothing() -> None:
    gone = {0: EVENT}
    assert overlap([head(gone, gone, last_event=11)])["kept_a"] == 10


def test_rows_that_left_the_window_are_no_kept_tokens() -> None:
    found = overlap([head({5: EVENT}, {6: EVENT}, oldest=4)])
    assert (found["kept_a"], found["jaccard"]) == (3, 2 / 4)


def test_heads_weigh_alike_and_the_worst_is_named() -> None:
    same, other = {1: EVENT}, {0: EVENT}
    heads = [
        head(same, same, layer=7),
        head(same, other, layer=7, kv_head=1),
        head({}, dict.fromkeys(range(4), EVENT), layer=2, kv_head=1, sequence=1),
    ]
    found = overlap(heads)
    assert found["jaccard"] == pytest.approx((1 + 6 / 8 + 4 / 8) / 3)
    assert found["worst"] == {"sequence": 1, "layer": 2, "kv_head": 1, "jaccard": 0.5}
    assert [one["layer"] for one in found["by_layer"]] == [2, 7]
    assert found["by_layer"][1] == {"layer": 7, "jaccard": 0.875, "jaccard_min": 0.75, "moved_tokens": 2}
    assert (found["heads"], found["heads_moved"]) == (3, 2)


def test_no_head_has_no_overlap() -> None:
    assert overlap([]) is None


def test_sides_of_unequal_length_are_refused() -> None:
    with pytest.raises(KvtoolError, match="12 tokens") as fault:
        HeadSets(0, 3, 1, torch.zeros(12, dtype=torch.int32), torch.zeros(13, dtype=torch.int32), 8, 8)
    assert fault.value.code == "shape"
