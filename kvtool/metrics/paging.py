"""Paging: what one event means for engines that keep rows in pages, and for those that keep one dense cache."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

PAGE_TOKENS = 16  # a common page size of serving engines


def paging(evict_step: Tensor, step: int, oldest: int, page_tokens: int) -> dict[str, Any]:
    """Pages of `page_tokens` rows that all KV heads share: row i of every head lies in page i // page_tokens, as
    engines lay them out that only ever append. A page may be freed once no head holds anything in it.

    Args:
        evict_step: [Hk, T].
        step: e, before whose query the event ran.
        oldest: the first row that query e sees.

    Returns:
        `pages_freed`: held something before, hold nothing now; never the page that row e goes to.
        `pages_held`: hold something now, and the page being filled.
        `fragmentation`: share of the written slots of held pages, over all heads, whose tokens were evicted; None
        where no page is held.
        `moved_tokens`: survivors that would change their slot if every head's cache, dense before the event, were
        made dense again, summed over heads.
    """
    evict = evict_step.numpy()
    seen = evict[:, oldest:step]
    before, after = seen >= step, seen > step  # [Hk, N]
    pages = np.arange(oldest, step) // page_tokens
    held_before, held = set(pages[before.any(0)].tolist()), set(pages[after.any(0)].tolist())
    if step % page_tokens:
        held.add(step // page_tokens)
    freed = held_before - held - {step // page_tokens}
    slots = np.isin(np.arange(step) // page_tokens, list(held))
    gone = int((evict[:, :step][:, slots] <= step).sum())
    left = before & ~after
    behind = np.maximum.accumulate(left, axis=1)  # something before this row left
    return {
        "pages_freed": len(freed),
        "pages_held": len(held),
        "fragmentation": gone / (int(slots.sum()) * len(evict)) if held else None,
        "moved_tokens": int((after & behind).sum()),
    }
