"""What stands around the attention kernels: which tiles meet, and how head dimensions are cut."""

from __future__ import annotations

import pytest
import torch

from kvtool.kernels.attention_mass.launch import as_int32, in_blocks, meeting, pieces, power_of_two


def test_runs_hold_every_tile_that_meets_and_none_before_or_after() -> None:
    g = torch.Generator().manual_seed(0)
    low = torch.randint(0, 50, (2, 9), generator=g)
    high = low + torch.randint(0, 9, (2, 9), generator=g)
    others_low = torch.randint(0, 60, (2, 13), generator=g)
    others_high = others_low + torch.randint(0, 5, (2, 13), generator=g)
    first, last = meeting(low, high, others_low, others_high)
    assert first.dtype == last.dtype == torch.int32
    for head in range(2):
        for block in range(9):
            met = [
                other
                for other in range(13)
                if others_low[head, other] <= high[head, block] and others_high[head, other] >= low[head, block]
            ]
            expected = (met[0], met[-1] + 1) if met else (0, 0)
            assert (int(first[head, block]), int(last[head, block])) == expected


def test_blocks_may_end_short() -> None:
    values = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
    assert in_blocks(values, 2, largest=True).tolist() == [[3, 4, 5], [9, 6, 3]]
    assert in_blocks(values, 2, largest=False).tolist() == [[1, 1, 5], [2, 5, 3]]
    assert in_blocks(values, 7, largest=False).tolist() == [[1], [2]]


@pytest.mark.parametrize("dim", [1, 5, 16, 20, 64, 72, 80, 96, 111, 112, 128, 192, 200, 256])
def test_two_pieces_hold_a_head_dimension(dim: int) -> None:
    first, rest = pieces(dim)
    assert first + rest >= dim
    assert all(piece in (0, 16, 32, 64, 128) for piece in (first, rest))
    assert rest == 0 or first < dim
    assert power_of_two(dim) >= dim > power_of_two(dim) // 2 or dim == 1


def test_steps_beyond_32_bits_stay_beyond_every_row() -> None:
    assert as_int32(torch.tensor([0, 7, 1 << 40, -(1 << 40)])).tolist() == [0, 7, 2**31 - 1, -(2**31)]
