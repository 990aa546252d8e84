"""Pages and moves of one event against loops over slots."""

from __future__ import annotations

import pytest
import torch

from kvtool.metrics.paging import paging


def looped(leaves: list[list[int]], step: int, oldest: int, size: int) -> dict[str, object]:
    """Every page and slot by itself."""
    pages = range(step // size + 1)
    freed, held, written, gone = 0, 0, 0, 0
    for page in pages:
        rows = [r for r in range(page * size, (page + 1) * size) if r < step]
        before = any(oldest <= r and mine[r] >= step for mine in leaves for r in rows)
        after = any(oldest <= r and mine[r] > step for mine in leaves for r in rows)
        filling = page == step // size
        freed += before and not after and not filling
        if after or (filling and rows):
            held += 1
            written += len(rows) * len(leaves)
            gone += sum(mine[r] <= step for mine in leaves for r in rows)
    moved = 0
    for mine in leaves:
        dense = [r for r in range(oldest, step) if mine[r] >= step]
        again = [r for r in dense if mine[r] > step]
        moved += sum(dense.index(r) != slot for slot, r in enumerate(again))
    share = gone / written if held else None
    return {"pages_freed": freed, "pages_held": held, "fragmentation": share, "moved_tokens": moved}


@pytest.mark.parametrize("size", [1, 4, 16])
@pytest.mark.parametrize("oldest", [0, 11])
def test_pages_equal_a_loop(size: int, oldest: int) -> None:
    freed = 0
    for seed in range(30):
        g = torch.Generator().manual_seed(seed)
        evict = torch.full((2, 50), 50, dtype=torch.int32)
        chance = 0.95 if seed % 2 else 0.5
        for step in (20, 32, 37):
            leaving = torch.rand(2, 50, generator=g) < chance
            leaving[:, step:] = False
            if seed % 3:
                leaving[:, step - 3 :] = False
            evict[leaving & (evict == 50)] = step
        for step in (20, 32, 37):
            found = paging(evict, step, oldest, size)
            assert found == looped(evict.tolist(), step, oldest, size), (seed, step)
            freed += found["pages_freed"]
    assert freed


def test_the_page_being_filled_is_held_and_never_freed() -> None:
    evict = torch.full((1, 12), 12, dtype=torch.int32)
    evict[0, :10] = 10
    assert paging(evict, 10, 0, 4) == {"pages_freed": 2, "pages_held": 1, "fragmentation": 1.0, "moved_tokens": 0}
    evict = torch.full((1, 12), 12, dtype=torch.int32)
    evict[0, :8] = 8
    assert paging(evict, 8, 0, 4) == {"pages_freed": 2, "pages_held": 0, "fragmentation": None, "moved_tokens": 0}


def test_only_survivors_behind_a_hole_move() -> None:
    evict = torch.full((1, 12), 12, dtype=torch.int32)
    evict[0, [2, 5]] = 10
    assert paging(evict, 10, 0, 4)["moved_tokens"] == 6  # rows 3, 4, 6, 7, 8, 9
