"""Cache sizes against a count of every token at every step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvtool.layer import Geometry, Layer
from kvtool.metrics import StepErrors
from kvtool.metrics.cache_size import CacheSize, bytes_per_token, leaving_steps, live_tokens
from kvtool.retained import RetainedSet

FULL = Geometry(layer=0, query_heads=4, kv_heads=2, key_dim=6, value_dim=10, scale=1.0, element_bytes=2)
KINDS = {
    "full": FULL,
    "sliding": replace(FULL, kind="sliding", window=13),
    "chunked": replace(FULL, kind="chunked", window=16),
}


def some_run(heads: int = 2, tokens: int = 63, seed: int = 0) -> Tensor:
    """[Hk, T]: about half of the tokens leave, at different times in different heads."""
    g = torch.Generator().manual_seed(seed)
    evict = torch.full((heads, tokens), tokens, dtype=torch.int32)
    for head in range(heads):
        for row in range(tokens - 1):
            if float(torch.rand(1, generator=g)) < 0.5:
                evict[head, row] = int(torch.randint(row + 1, tokens, (1,), generator=g))
    return evict


def counted(evict: Tensor, geometry: Geometry) -> list[list[int]]:
    tokens = evict.shape[1]
    first = geometry.first_visible(torch.arange(tokens)).tolist()
    leaves = evict.tolist()
    return [[sum(first[t] <= p <= t < mine[p] for p in range(tokens)) for t in range(tokens)] for mine in leaves]


def errors_at(steps: Tensor, heads: int = 4) -> StepErrors:
    nothing = torch.zeros(heads, len(steps), dtype=torch.float64)
    return StepErrors(steps, nothing, nothing, nothing, nothing, nothing)


@pytest.mark.parametrize("kind", KINDS)
def test_every_step_finds_what_a_loop_counts(kind: str) -> None:
    evict = some_run()
    assert live_tokens(evict, KINDS[kind]).tolist() == counted(evict, KINDS[kind])
    assert counted(evict, KINDS[kind])[0] != counted(evict, KINDS[kind])[1]
    whole = RetainedSet.keep_all(2, 63).evict_step
    assert live_tokens(whole, KINDS[kind]).tolist() == counted(whole, KINDS[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_rows_leave_the_window_when_no_later_query_sees_them(kind: str) -> None:
    first = KINDS[kind].first_visible(torch.arange(63)).tolist()
    expected = [next((t for t in range(p, 63) if first[t] > p), 63) for p in range(63)]
    assert leaving_steps(KINDS[kind], 63).tolist() == expected


@pytest.mark.parametrize("kind", KINDS)
def test_means_and_peaks_of_a_layer(kind: str) -> None:
    evict, geometry, steps = some_run(), KINDS[kind], torch.tensor([30, 31, 40, 62])
    found = CacheSize().partial(errors_at(steps), geometry, RetainedSet(evict))
    seen = [[of_head[t] for t in steps.tolist()] for of_head in counted(evict, geometry)]
    both = [sum(column) * (6 + 10) * 2 for column in zip(*seen, strict=True)]
    assert float(found["mean_cache_tokens"]) == pytest.approx(sum(map(sum, seen)) / 8, rel=1e-15)
    assert float(found["peak_cache_tokens"]) == max(map(max, seen))
    assert float(found["mean_cache_bytes"]) == pytest.approx(sum(both) / 4, rel=1e-15)
    assert float(found["peak_cache_bytes"]) == max(both)


def test_bytes_of_layers_are_summed_step_by_step_before_the_peak() -> None:
    """One cache shrinks when the other has grown: the sum never reaches the sum of the peaks."""
    falling, rising = (torch.full((1, 20), 20, dtype=torch.int32) for _ in range(2))
    falling[0, :10] = 12
    one = Geometry(0, 1, 1, 1, 1, 1.0, element_bytes=1)
    partials = [
        CacheSize().partial(errors_at(torch.arange(10, 20), 1), one, RetainedSet(evict)) for evict in (falling, rising)
    ]
    cell = CacheSize().combine(partials)
    by_step = [2 * (a + b) for a, b in zip(counted(falling, one)[0], counted(rising, one)[0], strict=True)][10:]
    assert cell["peak_cache_bytes"] == max(by_step) < sum(float(p["peak_cache_bytes"]) for p in partials)
    assert cell["mean_cache_bytes"] == pytest.approx(sum(by_step) / 10, rel=1e-15)
    assert cell["peak_cache_tokens"] == 20


def test_heads_count_the_same_whatever_layer_they_are_in() -> None:
    wide = replace(FULL, kv_heads=3, query_heads=3)
    runs = [(FULL, some_run(2)), (wide, some_run(3, seed=1))]
    partials = [CacheSize().partial(errors_at(torch.arange(40, 50)), g, RetainedSet(e)) for g, e in runs]
    seen = [t for g, e in runs for head in counted(e, g) for t in head[40:50]]
    assert CacheSize().combine(partials)["mean_cache_tokens"] == pytest.approx(sum(seen) / len(seen), rel=1e-15)


def test_a_shared_cache_is_counted_in_bytes_once() -> None:
    reader = replace(FULL, layer=1, kv_source=0)
    assert bytes_per_token(FULL) == 32
    assert bytes_per_token(reader) == 0
    evict, steps = some_run(), torch.arange(40, 50)
    own, read = (CacheSize().partial(errors_at(steps), g, RetainedSet(evict)) for g in (FULL, reader))
    assert float(read["peak_cache_bytes"]) == 0
    assert float(read["mean_cache_tokens"]) == float(own["mean_cache_tokens"])
    assert CacheSize().combine([own, read])["peak_cache_bytes"] == float(own["peak_cache_bytes"])


def test_bytes_need_steps_that_all_layers_have() -> None:
    evict = some_run()
    apart = [CacheSize().partial(errors_at(torch.tensor([step])), FULL, RetainedSet(evict)) for step in (40, 41)]
    assert CacheSize().combine(apart)["peak_cache_bytes"] is None
    assert CacheSize().combine(apart)["peak_cache_tokens"] is not None
    empty = CacheSize().partial(errors_at(torch.arange(0)), FULL, RetainedSet(evict))
    assert set(CacheSize().combine([empty]).values()) == {None}


def test_layers_in_memory_know_the_size_of_their_numbers() -> None:
    for dtype, size in ((torch.bfloat16, 2), (torch.float32, 4), (torch.float64, 8)):
        array = torch.zeros(1, 3, 2, dtype=dtype)
        assert Layer.from_arrays(array, array, array, prompt_length=2, scale=1.0).geometry.element_bytes == size
