"""How close a cut was: against a loop over all pairs that rounding could exchange."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtool.selection import cut, rank, select, select_pages


def dumb_near(scores: list[float], keep: list[bool], free: list[bool], rounding: float) -> tuple[float, list[bool]]:
    """(relative margin, near) of one head, from the definition."""
    kept = [s for s, k, f in zip(scores, keep, free, strict=True) if k and f]
    gone = [s for s, k, f in zip(scores, keep, free, strict=True) if not k and f]
    if not kept or not gone:
        return math.nan, [False] * len(scores)
    last, first = min(kept), max(gone)
    middle = sorted(abs(s) for s, f in zip(scores, free, strict=True) if f and math.isfinite(s))
    lower_median = middle[(len(middle) - 1) // 2] if middle else 0.0
    scale = max([lower_median, *(abs(s) for s in (last, first) if math.isfinite(s))])
    reach = rounding * scale
    near = [
        f and ((s == first or s - first <= reach) if k else (s == last or last - s <= reach))
        for s, k, f in zip(scores, keep, free, strict=True)
    ]
    margin = 0.0 if last == first else last - first
    relative = math.nan if not math.isfinite(margin) else margin / scale if scale else 0.0
    return relative, near


numbers = st.one_of(
    st.sampled_from([0.0, 1.0, 1.0 + 4e-6, 1.0 - 4e-6, 1.0 + 3e-11, 2.0, -1.0, math.inf, -math.inf]),
    st.floats(-3, 3, allow_nan=False, width=32),
)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(numbers, min_size=1, max_size=12),
    st.integers(0, 13),
    st.integers(0, 3),
    st.integers(0, 3),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_near_ties_are_the_tokens_that_rounding_could_exchange(values, budget, sinks, window, dtype):
    step = len(values)
    scores = torch.tensor([values], dtype=torch.float64)
    tokens = torch.arange(step)[None]
    found = cut(rank(scores, tokens, sinks=sinks, window=window, step=step), [budget], dtype)
    free = [sinks <= row < step - window for row in range(step)]
    rounding = 1e-5 if dtype == torch.float32 else 1e-10
    relative, near = dumb_near([v + 0.0 for v in values], found.keep[0].tolist(), free, rounding)
    assert found.near[0].tolist() == near
    assert float(found.relative_margin[0]) == pytest.approx(relative, rel=1e-12, nan_ok=True)
    assert int(found.ties[0]) <= int(found.near[0].sum())


def test_the_dtype_of_the_scores_decides_where_none_is_named():
    scores = torch.tensor([[1.0, 1.0 + 3e-6, 2.0, 0.5]], dtype=torch.float64)
    tokens = torch.arange(4)[None]
    order = rank(scores, tokens, sinks=0, window=0, step=4)
    assert cut(order, [2]).near.sum().item() == 0
    assert cut(order, [2], torch.float32).near[0].tolist() == [True, True, False, False]
    assert select(scores.to(torch.float32), tokens, [2], sinks=0, window=0, step=4).near.sum().item() == 2


def test_the_nearest_narrower_dtype_is_no_rounding():
    """A cast to bfloat16 moves scores by up to 2^-9 and never counts as rounding of the wider dtype."""
    scores = torch.linspace(1.0, 0.5, 500)[None]  # the newest score least, so that a tie turns the order round
    tokens = torch.arange(500)[None]
    wide = select(scores, tokens, [250], sinks=0, window=0, step=500)
    narrow = select(scores.to(torch.bfloat16).to(torch.float32), tokens, [250], sinks=0, window=0, step=500)
    moved = int((wide.keep & ~narrow.keep).sum())
    assert moved > 0
    assert int(wide.near.sum()) == 0 < int(narrow.near.sum())


def test_pages_count_the_tokens_of_near_pages():
    scores = torch.tensor([[1.0, 1.0, 1.0, 1.0, 1.0 + 2e-6, 1.0 + 2e-6, 5.0]])
    found = select_pages(scores, torch.arange(7), 5, block=2, sinks=0, window=0, step=8)
    assert found.keep[0].tolist() == [False, False, True, True, True, True, True]
    assert found.near[0].tolist() == [True] * 6 + [False]
