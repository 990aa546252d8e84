"""Moving statistics: the exponential moving average of queries as a state that grows run by run."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvtool.layer import Geometry
from kvtool.policies.query_statistics import QueryStatistics, first_counted, floored
from kvtool.view import View

BLOCK = 1024  # queries in float64 at a time


@dataclass(frozen=True, eq=False)
class MovingStatistics:
    """Weighted mean and spread of the queries of rows first..stop-1, the newest weighing 1, the one before it
    beta, and so on. Bias correction is division by the total weight (1 - beta^n) / (1 - beta).

    Attributes:
        beta: decay per query.
        exclude: first rows of the sequence that are left out, see `first_counted`.
        full: whether `spread` is the covariance or its diagonal.
        first, stop: rows counted, none where they are equal.
        weight: total weight.
        mean: [H, D] float64.
        spread: [H, D, D] or [H, D] float64, weighted mean of the squares about the mean.
    """

    beta: float
    exclude: int
    full: bool
    first: int
    stop: int
    weight: float
    mean: Tensor
    spread: Tensor

    @classmethod
    def nothing(cls, geometry: Geometry, beta: float, exclude: int, full: bool) -> MovingStatistics:
        heads, dim = geometry.query_heads, geometry.key_dim
        spread = torch.zeros((heads, dim, dim) if full else (heads, dim), dtype=torch.float64)
        return cls(beta, exclude, full, 0, 0, 0.0, torch.zeros(heads, dim, dtype=torch.float64), spread)

    def extended(self, view: View) -> MovingStatistics:
        """The statistics after the steps view.start..view.step-1; the argument is left as it was.

        While the sequence is shorter than what is left out, the newest query stands alone, and is dropped
        again when a later one comes.
        """
        first = first_counted(view, self.exclude)
        known = self
        if first != self.first or self.stop == self.first:
            known = replace(self, first=first, stop=first, weight=0.0)
        for start in range(known.stop, view.step, BLOCK):
            known = known._merged(view.queries(start, min(start + BLOCK, view.step)))
        return known

    def _merged(self, queries: Tensor) -> MovingStatistics:
        """With `queries` [H, n, D] behind what is known: weighted moments of both parts, put together as by Chan,
        Golub and LeVeque (1983), where nothing cancels."""
        count = queries.shape[1]
        shares = self.beta ** torch.arange(count - 1, -1, -1, dtype=torch.float64)
        new, old = float(shares.sum()), self.weight * self.beta**count
        shares, total = shares / new, new + old
        mean, spread = torch.empty_like(self.mean), torch.empty_like(self.spread)
        for head, own in enumerate(queries):
            wide = own.to(torch.float64)
            centre = shares @ wide
            centred, gap = wide - centre, centre - self.mean[head]
            if self.full:
                within, between = centred.T @ (shares[:, None] * centred), torch.outer(gap, gap)
            else:
                within, between = shares @ centred.square(), gap.square()
            mean[head] = self.mean[head] + gap * (new / total)
            spread[head] = (old * self.spread[head] + new * within) / total + between * (old * new / total**2)
        return replace(self, stop=self.stop + count, weight=total, mean=mean, spread=spread)

    def statistics(self, variance_floor: float) -> QueryStatistics:
        """Mean and covariance, diagonal unless `full`; the variance of a channel is at least `variance_floor`."""
        covariance = self.spread if self.full else torch.diag_embed(self.spread)
        return floored(QueryStatistics(self.mean, covariance), variance_floor)
