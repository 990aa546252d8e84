"""Mean and covariance of the queries that are expected, from the queries that have been."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvtool.view import View

StatisticsSource = Literal["rope_mean", "prompt"]


@dataclass(frozen=True, eq=False)
class QueryStatistics:
    """Per query head, in the space of the cached (rotated) keys.

    Attributes:
        mean: [H, D] float64.
        covariance: [H, D, D] float64, about the mean, divided by the number of queries.
    """

    mean: Tensor
    covariance: Tensor

    @property
    def variance(self) -> Tensor:
        """[H, D], the diagonal of the covariance."""
        return self.covariance.diagonal(dim1=1, dim2=2)


def past_statistics(view: View, source: StatisticsSource, exclude: int) -> QueryStatistics:
    """Statistics of all queries before the event but the first `exclude`, evicted tokens' included.

    The first queries are outliers in most models. The newest query always stays in, so that an
    event right after the start of a sequence has statistics at all.

    Args:
        source: `rope_mean` un-rotates the queries, `prompt` takes them as they were used.
    """
    first = max(0, min(exclude, view.step - 1))
    read = view.queries if source == "prompt" else view.unrotated_queries
    queries = read(first, view.step)  # [H, n, D]
    heads, count, dim = queries.shape
    mean = torch.empty(heads, dim, dtype=torch.float64)
    covariance = torch.empty(heads, dim, dim, dtype=torch.float64)
    for head in range(heads):  # one head in float64 at a time: a whole layer of them would double the memory
        wide = queries[head].to(torch.float64)
        mean[head] = wide.mean(0)
        centred = wide - mean[head]
        covariance[head] = centred.T @ centred / count
    return QueryStatistics(mean, covariance)


def mean_rotation(view: View, horizon: int) -> Tensor:
    """[D, D] float64, the rotation averaged over the next `horizon` positions; the identity without one."""
    dim = view.geometry.key_dim
    rotation = view.rotation
    if rotation is None:
        return torch.eye(dim, dtype=torch.float64)
    return rotation.mean_matrix(view.next_positions(horizon), dim)


def expected_statistics(view: View, source: StatisticsSource, exclude: int, horizon: int) -> QueryStatistics:
    """Statistics of the queries to come.

    `rope_mean` rotates mean and covariance by the mean rotation of the next `horizon` positions
    (Expected Attention, 2510.00636); `prompt` expects the past to go on, rotation included.
    """
    past = past_statistics(view, source, exclude)
    if source == "prompt":
        return past
    turn = mean_rotation(view, horizon)
    return QueryStatistics(past.mean @ turn.T, turn @ past.covariance @ turn.T)
