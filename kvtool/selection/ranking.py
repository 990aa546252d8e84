"""Ranking: one order over the candidates that every budget cuts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvtool.shapes import expect_shapes


class NaNScore(ValueError):
    """A score is NaN; the caller knows the policy, the layer and the step and says so.

    Attributes:
        head: KV head of the first NaN.
        row: row index of the token it belongs to.
    """

    def __init__(self, head: int, row: int) -> None:
        super().__init__(f"the score of row {row} in KV head {head} is NaN")
        self.head = head
        self.row = row


@dataclass(frozen=True, eq=False)
class Ranking:
    """The candidates of one event in the order in which they would be kept.

    Attributes:
        ranking: [Hk, N] int64, 1 = kept last (whatever the budget), N = evicted first.
        ordered: [Hk, N] scores in rank order.
        protected: [Hk] int64, how many leading ranks are protected.
    """

    ranking: Tensor
    ordered: Tensor
    protected: Tensor

    @cached_property
    def counts(self) -> list[int]:
        """`protected`, for all cuts."""
        found: list[int] = self.protected.tolist()
        return found

    @cached_property
    def free(self) -> list[np.ndarray[Any, Any]]:
        """Per KV head its unprotected scores in rank order, float64; for all cuts."""
        wide = self.ordered.to(torch.float64).cpu().numpy()
        return [scores[protected:] for scores, protected in zip(wide, self.counts, strict=True)]

    @cached_property
    def typical(self) -> list[float]:
        """Per KV head the median magnitude of its finite unprotected scores, 0 without one; for all cuts."""
        found = []
        for scores in self.free:
            sizes = np.abs(scores[np.isfinite(scores)])
            middle = (sizes.size - 1) // 2
            found.append(float(np.partition(sizes, middle)[middle]) if sizes.size else 0.0)
        return found


def rank(scores: Tensor, tokens: Tensor, *, sinks: int, window: int, step: int) -> Ranking:
    """Order by (protected, score, newer row), all descending.

    Protected tokens lead: sinks from row 0 on, then the window from its newest row back, so
    that a budget smaller than the protection still cuts in the right place. The sorts are
    stable, hence the same on every device, and negative zero equals zero.

    Args:
        scores: [Hk, N], higher is kept; infinities are allowed.
        tokens: [Hk, N] int64 row indices.
        sinks: rows 0..sinks-1 are protected.
        window: rows step-window..step-1 are protected.
        step: the event.

    Raises:
        NaNScore: naming the first one.
        KvtoolError: code `shape`.
    """
    expect_shapes(scores=(scores, "Hk N"), tokens=(tokens, "Hk N"))
    broken = torch.isnan(scores).nonzero()
    if broken.numel():
        head, column = (int(n) for n in broken[0])
        raise NaNScore(head, int(tokens[head, column]))
    scores = scores + 0.0  # -0.0 becomes 0.0: radix sorts tell them apart, comparisons do not

    order = _newest_first(scores, tokens)
    rows = tokens.gather(1, order)
    is_sink, is_recent = rows < sinks, rows >= step - window
    protected = is_sink | is_recent
    if bool(protected.any()):
        # Behind the protected ones all are alike, and the sort leaves them as they are.
        precedence = torch.where(is_recent, sinks + step - 1 - rows, sinks + max(window, 0))
        order = order.gather(1, torch.where(is_sink, rows, precedence).argsort(dim=1, stable=True))

    places = torch.arange(1, tokens.shape[1] + 1, device=tokens.device).expand_as(order)
    return Ranking(
        ranking=torch.empty_like(order).scatter_(1, order, places),
        ordered=scores.gather(1, order),
        protected=protected.sum(1),
    )


def _newest_first(scores: Tensor, tokens: Tensor) -> Tensor:
    """[Hk, N] columns by score descending, of equals the newer row first."""
    if bool((tokens[:, 1:] > tokens[:, :-1]).all()):  # ascending rows, as candidates are: read from behind
        return tokens.shape[1] - 1 - scores.flip(1).argsort(dim=1, descending=True, stable=True)
    order = tokens.argsort(dim=1, descending=True, stable=True)
    return order.gather(1, scores.gather(1, order).argsort(dim=1, descending=True, stable=True))
