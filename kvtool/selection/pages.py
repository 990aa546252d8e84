"""Pages: selection where whole blocks of rows leave at once, the same in every head of a layer."""

from __future__ import annotations

import torch
from torch import Tensor

from kvtool.selection.one_shot import Selection, cut
from kvtool.selection.ranking import NaNScore, rank


def select_pages(
    scores: Tensor,
    tokens: Tensor,
    budget: int,
    *,
    block: int,
    sinks: int,
    window: int,
    step: int,
    dtype: torch.dtype | None = None,
) -> Selection:
    """Keep whole pages of `block` rows; row i lies in page i // block, whoever else is left in it.

    A page scores the mean over its candidates and all heads; +inf in any of them keeps it. Pages that hold a
    protected row are protected, and so is the page that the next row goes to: it is never freed, even if it alone
    exceeds the budget. Pages stay in order of their rank as long as all of them together fit into the budget.

    Args:
        scores: [Hk, N], higher is kept.
        tokens: [N] int64 candidates, ascending, the same in every head.
        budget: tokens that every KV head may keep.
        sinks, window, step: see `rank`, in rows.
        dtype: see `cut`.

    Returns:
        The selection over tokens. `ties` and `margin` speak of pages, `near` of their tokens, `overfull` also
        where the page that is being filled does not fit.

    Raises:
        NaNScore: a score is NaN.
    """
    broken = torch.isnan(scores).nonzero()
    if broken.numel():
        raise NaNScore(int(broken[0, 0]), int(tokens[broken[0, 1]]))
    heads, count = scores.shape
    pages, member = torch.unique(tokens // block, return_inverse=True)  # [P] ascending, [N]
    sizes = torch.bincount(member, minlength=pages.numel())
    wide = scores.to(torch.float64)
    must = (wide == torch.inf).any(0)
    summed = torch.zeros(pages.numel(), dtype=torch.float64)
    summed.index_add_(0, member, wide.masked_fill(must, 0.0).sum(0))
    by_page = summed / (heads * sizes)
    by_page[member[must]] = torch.inf
    filling = (step % block != 0) & (pages == (step - 1) // block)  # [P] the page that row `step` goes to
    ahead = -(-step // block)  # pages that hold a row before the step, so the newest is ahead - 1
    # The page being filled is one of the newest: it takes its room from pages that may be freed.
    recent = max(window, int(step % block != 0))
    first_recent = max(step - recent, 0) // block if recent else ahead
    ranking = rank(by_page[None], pages[None], sinks=-(-sinks // block), window=ahead - first_recent, step=ahead)
    order = ranking.ranking[0].argsort()
    fitting = int((sizes[order].cumsum(0) <= budget).sum())
    chosen = cut(ranking, [fitting], dtype or scores.dtype)
    kept = chosen.keep[0] | filling
    stays = kept[member]
    achieved = int(sizes[kept].sum())
    return Selection(
        keep=stays.expand(heads, count).clone(),
        achieved=torch.full((heads,), achieved),
        ties=chosen.ties.expand(heads).clone(),
        margin=chosen.margin.expand(heads).clone(),
        relative_margin=chosen.relative_margin.expand(heads).clone(),
        near=chosen.near[0][member].expand(heads, count).clone(),
        overfull=chosen.overfull or achieved > budget,
        ranking=ranking.ranking[0][member].expand(heads, count).clone(),
    )
