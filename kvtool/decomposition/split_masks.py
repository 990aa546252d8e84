"""Split masks: damages of all combinations of two halves of the tokens, from tables over each half."""

from __future__ import annotations

import torch
from torch import Tensor

TILE_NUMBERS = 1 << 17  # float64 numbers of one tile: 1 MiB, about a core's own cache
TINY = 1e-140  # added to attention shares, so that their squares stay normal numbers


def add_damage(total: Tensor, older: Tensor, newer: Tensor, gram: Tensor, p: Tensor, split: int) -> None:
    """Add the damage of every query to `total` [A, B]: m^T M m / (p^T m)^2 of the indicator m of both halves.

    m^T M m = a^T M_aa a + 2 a^T M_ab b + b^T M_bb b, so that a query is one product of [A, w + 2] with [w + 2, B].

    Args:
        older: [A, split] float64, indicators of the older half's subsets, led by a 1 for the sink.
        newer: [B, w], of the newer half's.
        gram: [R, split + w, split + w], M of every query.
        p: [R, split + w] shares of attention.
    """
    width, columns = newer.shape[1], newer.shape[0]
    lines = max(1, min(older.shape[0], TILE_NUMBERS // columns))
    queries = max(1, TILE_NUMBERS // (lines * columns))  # at a time, where tables are small
    transposed = newer.T.contiguous()
    room = torch.empty(2, queries * lines * columns, dtype=torch.float64)
    for start in range(0, len(gram), queries):
        m, q = gram[start : start + queries], p[start : start + queries]
        right = torch.ones(len(m), width + 2, columns, dtype=torch.float64)
        right[:, :width] = transposed
        right[:, width + 1] = (m[:, split:, split:] @ transposed).mul_(transposed).sum(1)
        turned = older @ m[:, :split]  # [r, A, split + w]
        left = torch.ones(len(m), len(older), width + 2, dtype=torch.float64)
        torch.mul(turned[..., split:], 2, out=left[..., :width])
        left[..., width] = turned[..., :split].mul_(older).sum(-1)
        below_older, below_newer = q[:, :split] @ older.T, q[:, split:] @ transposed + TINY  # [r, A], [r, B]
        for first in range(0, older.shape[0], lines):
            part = slice(first, min(first + lines, older.shape[0]))
            shape = (len(m), part.stop - first, columns)
            form, below = room[:, : shape[0] * shape[1] * columns].view(2, *shape)
            torch.bmm(left[:, part], right, out=form)
            torch.add(below_older[:, part, None], below_newer[:, None], out=below)
            below.square_()
            if len(m) == 1:
                total[part].addcdiv_(form[0], below[0])
            else:
                total[part] += form.div_(below).sum(0)
