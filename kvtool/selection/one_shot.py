"""One-shot selection: cut a ranking at the budget."""

from __future__ import annotations

import math
from bisect import bisect_left
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
    achieved = torch.tensor(list(budgets), dtype=torch.int64, device=device).clamp_max(candidates)
    keep = ranking.ranking <= achieved[:, None]

    # the cut lies between ranks `achieved` and `achieved + 1`, where both are unprotected
    ties = torch.zeros(heads, dtype=torch.int64, device=device)
    margin = torch.full((heads,), torch.nan, dtype=torch.float64, device=device)
    relative = margin.clone()
    near = torch.zeros_like(keep)
    rounding = ROUNDING_FLOAT64 if (dtype or ranking.ordered.dtype) == torch.float64 else ROUNDING
    for head, (kept, protected) in enumerate(zip(achieved.tolist(), ranking.protected.tolist(), strict=True)):
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
        if math.isfinite(float(margin[head])):
            relative[head] = margin[head] / scale if scale > 0 else 0.0
        first, last = _close(free, place, rounding * scale)
        near[head] = (ranking.ranking[head] > protected + first) & (ranking.ranking[head] <= protected + last)
    return Selection(
        keep=keep,
        achieved=achieved,
        ties=ties,
        margin=margin,
        relative_margin=relative,
        near=near,
        overfull=bool((achieved < ranking.protected).any()),
        ranking=ranking.ranking,
    )


def _close(descending: Scores, place: int, distance: float) -> tuple[int, int]:
    """Where those lie that `distance` could move across the cut before `place`: kept ones that far from the first
    evicted, evicted ones that far from the last kept; from the first of them to behind the last."""
    evicted, kept = float(descending[place]), float(descending[place - 1])

    def near(at: int, other: float) -> bool:
        mine = float(descending[at])
        return mine == other or abs(mine - other) <= distance  # equal infinities less each other are NaN

    first = bisect_left(range(place), True, key=lambda at: near(at, evicted))
    last = bisect_left(range(place, len(descending)), True, key=lambda at: not near(at, kept))
    return first, place + last


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
