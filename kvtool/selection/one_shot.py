"""One-shot selection: cut a ranking at the budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtool.errors import KvtoolError
from kvtool.selection.ranking import Ranking, rank


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
        overfull: the protection exceeded the budget in some head, so protected tokens went too.
        ranking: [Hk, N] int64, 1 = kept last.
    """

    keep: Tensor
    achieved: Tensor
    ties: Tensor
    margin: Tensor
    overfull: bool
    ranking: Tensor


def cut(ranking: Ranking, budgets: Sequence[int]) -> Selection:
    """Keep the first `budgets[h]` of every KV head; any number of cuts shares one ranking.

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
    between = (achieved > ranking.protected) & (achieved < candidates)
    ties = torch.zeros(heads, dtype=torch.int64, device=device)
    margin = torch.full((heads,), torch.nan, dtype=torch.float64, device=device)
    for head in between.nonzero()[:, 0].tolist():
        scores = ranking.ordered[head]
        last_kept, first_evicted = scores[achieved[head] - 1], scores[achieved[head]]
        if last_kept == first_evicted:
            ties[head] = (scores[ranking.protected[head] :] == last_kept).sum()
            margin[head] = 0.0
        else:
            margin[head] = last_kept.to(torch.float64) - first_evicted.to(torch.float64)
    return Selection(keep, achieved, ties, margin, bool((achieved < ranking.protected).any()), ranking.ranking)


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
