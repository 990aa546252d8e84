"""One-shot selection: cut a ranking at the budget."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from kvtool.errors import KvtoolError
from kvtool.selection.ranking import Ranking, rank

Scores: TypeAlias = np.ndarray[Any, Any]
# How far rounding may move a score, relative to the scores about it: what another order of the same sums does, and a
# hundred times less than a narrower dtype would.
ROUNDING, ROUNDING_FLOAT64 = 1e-5, 1e-10
NEARBY = 32  # scores about a cut that are looked at first


@dataclass(frozen=True, eq=False)
class Selection:
    """What one event keeps.

    Attributes:
        keep: [Hk, N] bool.
        achieved: [Hk] int64, tokens kept: min(budget, N), exactly.
        ties: [Hk] int64, unprotected tokens whose score equals the one at the cut while the cut
            runs through them; 0 where it does not.
        margin: [Hk] float64, lowest kept unprotected score minus highest evicted one (0 at a
            tie, infinities included); NaN where one of the two does not exist.
        relative_margin: [Hk] float64, the margin over the larger of the scores at the cut and the median unprotected
            one, all by magnitude; NaN where there is no margin or it is infinite.
        near: [Hk, N] bool, unprotected tokens that rounding could have put on the other side of the cut.
        overfull: the protection exceeded the budget in some head, so protected tokens went too.
        ranking: [Hk, N] int64, 1 = kept last.
    """

    keep: Tensor
    achieved: Tensor
    ties: Tensor
    margin: Tensor
    relative_margin: Tensor
    near: Tensor
    overfull: bool
    ranking: Tensor


def cut(ranking: Ranking, budgets: Sequence[int], dtype: torch.dtype | None = None) -> Selection:
    """Keep the first `budgets[h]` of every KV head; any number of cuts shares one ranking.

    Args:
        dtype: what the scores were computed in, which says how far rounding may move them; None is their own.

    Raises:
        KvtoolError: code `shape` unless there is one budget per KV head, none of them negative.
    """
    heads, candidates = ranking.ranking.shape
    if len(budgets) != heads or min(budgets, default=0) < 0:
        raise KvtoolError("shape", f"budgets {list(budgets)} do not fit {heads} KV heads")
    device = ranking.ranking.device
    achieved = [min(budget, candidates) for budget in budgets]
    # the cut lies between ranks `achieved` and `achieved + 1`, where both are unprotected
    ties, margin, relative = [0] * heads, [math.nan] * heads, [math.nan] * heads
    near = [(0, 0)] * heads  # in rank order, from and to
    rounding = ROUNDING_FLOAT64 if (dtype or ranking.ordered.dtype) == torch.float64 else ROUNDING
    protection = ranking.counts
    for head, (kept, protected) in enumerate(zip(achieved, protection, strict=True)):
        if not protected < kept < candidates:
            continue
        free, place = ranking.free[head], kept - protected
        last_kept, first_evicted = float(free[place - 1]), float(free[place])
        if last_kept == first_evicted:
            ties[head] = int((free == last_kept).sum())
            margin[head] = 0.0
        else:
            margin[head] = last_kept - first_evicted
        scale = max([ranking.typical[head], *(abs(s) for s in (last_kept, first_evicted) if math.isfinite(s))])
        if math.isfinite(margin[head]):
            relative[head] = margin[head] / scale if scale > 0 else 0.0
        low, high = _close(free, place, rounding * scale)
        near[head] = (protected + low, protected + high)

    def column(values: Sequence[float], kind: torch.dtype) -> Tensor:
        return torch.tensor(list(values), dtype=kind, device=device)

    kept_ranks, begin, end = (
        column(ranks, torch.int64)[:, None] for ranks in (achieved, *(list(one) for one in zip(*near, strict=True)))
    )
    return Selection(
        keep=ranking.ranking <= kept_ranks,
        achieved=kept_ranks[:, 0],
        ties=column(ties, torch.int64),
        margin=column(margin, torch.float64),
        relative_margin=column(relative, torch.float64),
        near=(ranking.ranking > begin) & (ranking.ranking <= end),
        overfull=any(kept < protected for kept, protected in zip(achieved, protection, strict=True)),
        ranking=ranking.ranking,
    )


def _close(scores: Scores, place: int, distance: float) -> tuple[int, int]:
    """From and to where the kept `scores` [n], descending, lie within `distance` of the first evicted, and the
    evicted ones within it of the last kept: a run about the cut."""
    low = place - _run(scores[:place][::-1], scores[place], distance)
    return low, place + _run(scores[place:], scores[place - 1], distance)


def _run(scores: Scores, other: Any, distance: float) -> int:
    """How many of the first `scores`, which move away from `other`, lie within `distance` of it."""
    length = NEARBY
    while True:
        some = scores[:length]
        with np.errstate(invalid="ignore"):  # infinities less each other
            close = (some == other) | (np.abs(some - other) <= distance)
        if not close.all():
            return int(close.argmin())
        if length >= scores.size:
            return int(scores.size)
        length *= 8


def select(scores: Tensor, tokens: Tensor, budgets: Sequence[int], *, sinks: int, window: int, step: int) -> Selection:
    """Rank and cut at once.

    Args:
        scores: [Hk, N], higher is kept.
        tokens: [Hk, N] int64 row indices.
        budgets: one per KV head; a budget of N or more keeps all.
        sinks, window, step: see `rank`.

    Raises:
        NaNScore: a score is NaN.
        KvtoolError: code `shape`.
    """
    return cut(rank(scores, tokens, sinks=sinks, window=window, step=step), budgets)
