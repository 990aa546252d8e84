"""Mean and covariance of the queries that are expected, from the queries that have been."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvtool.errors import KvtoolError
from kvtool.policies.query_source import QuerySource
from kvtool.view import View

StatisticsSource = Literal["rope_mean", "prompt"]
VARIANCE_FLOOR = 1e-6  # of the moving average, whose variance vanishes when its newest queries agree


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

    def diagonal_only(self) -> QueryStatistics:
        """The same without covariances of different channels."""
        return QueryStatistics(self.mean, torch.diag_embed(self.variance))


def first_counted(view: View, exclude: int) -> int:
    """The first row that statistics read: the newest query always stays in, so that an event right after the
    start of a sequence has statistics at all."""
    return max(0, min(exclude, view.step - 1))


def statistics_of(queries: Tensor, shares: Tensor | None = None) -> QueryStatistics:
    """Mean and covariance of `queries` [H, n, D], each weighted by `shares` [n] that add up to 1, or evenly."""
    return statistics_by_head(queries, queries.shape[0], queries.shape[2], shares)


def statistics_by_head(
    queries: Iterable[Tensor], heads: int, dim: int, shares: Tensor | None = None
) -> QueryStatistics:
    """The same of `heads` tensors [n, D], one after another: a whole layer in float64 would double the memory."""
    # Made first: a small result between two large temporaries keeps the system from reusing their memory.
    mean = torch.empty(heads, dim, dtype=torch.float64)
    covariance = torch.empty(heads, dim, dim, dtype=torch.float64)
    for head, narrow in enumerate(queries):
        wide = narrow.to(torch.float64, copy=True)
        if shares is None:
            mean[head] = wide.mean(0)
            centred = wide.sub_(mean[head])
            covariance[head] = centred.T @ centred / len(wide)
        else:
            mean[head] = shares @ wide
            centred = wide.sub_(mean[head])
            covariance[head] = centred.T @ (shares[:, None] * centred)
    return QueryStatistics(mean, covariance)


def past_statistics(view: View, source: StatisticsSource, exclude: int) -> QueryStatistics:
    """Statistics of all queries before the event but the first `exclude`, evicted tokens' included.

    The first queries are outliers in most models.

    Args:
        source: `rope_mean` un-rotates the queries, `prompt` takes them as they were used.

    Returns:
        Statistics that policies may share: none of them may change them.
    """
    first = first_counted(view, exclude)
    key = ("query statistics", source, first, view.step)
    if key not in view.shared:
        geometry = view.geometry
        if source == "prompt":
            found = statistics_of(view.queries(first, view.step))
        else:
            unrotated = view.unrotated_by_head(first, view.step)
            found = statistics_by_head(unrotated, geometry.query_heads, geometry.key_dim)
        view.shared[key] = found
    known: QueryStatistics = view.shared[key]
    return known


def moving_average(view: View, beta: float, exclude: int, variance_floor: float = VARIANCE_FLOOR) -> QueryStatistics:
    """m <- beta m + (1 - beta) q over the queries in order, and likewise the second moment, from zero, each divided
    by 1 - beta^n at the end; the variance of a channel is at least `variance_floor`.

    The definition, written as a weighted mean, where nothing cancels; `MovingStatistics` is the same as a state.
    """
    first = first_counted(view, exclude)
    age = torch.arange(view.step - first - 1, -1, -1, dtype=torch.float64)
    shares = beta**age
    return floored(statistics_of(view.queries(first, view.step), shares / shares.sum()), variance_floor)


def floored(found: QueryStatistics, variance_floor: float) -> QueryStatistics:
    """The same with every variance at least `variance_floor`."""
    short = (variance_floor - found.variance).clamp_min(0)
    return QueryStatistics(found.mean, found.covariance + torch.diag_embed(short))


def future_statistics(view: View) -> QueryStatistics:
    """Statistics of the evaluated steps' own queries, for oracles.

    Raises:
        KvtoolError: code `no-queries` where there are none.
    """
    future = view.future
    if future.steps.numel() == 0:
        raise KvtoolError(
            "no-queries",
            f"statistics=future needs queries at or after step {view.step}, and layer {view.geometry.layer} has none",
            "evict earlier, or capture more tokens",
        )
    rows = torch.searchsorted(future.layer.query_steps, future.steps)
    return statistics_of(future.layer.queries[:, rows])


def mean_rotation(view: View, horizon: int) -> Tensor:
    """[D, D] float64, the rotation averaged over the next `horizon` positions; the identity without one."""
    dim = view.geometry.key_dim
    rotation = view.rotation
    if rotation is None:
        return torch.eye(dim, dtype=torch.float64)
    return rotation.mean_matrix(view.next_positions(horizon), dim)


def turned(past: QueryStatistics, turn: Tensor) -> QueryStatistics:
    """The statistics after the linear map `turn` [D, D]."""
    return QueryStatistics(past.mean @ turn.T, turn @ past.covariance @ turn.T)


def expected_statistics(
    view: View, source: QuerySource, exclude: int, horizon: int, variance_floor: float = VARIANCE_FLOOR
) -> QueryStatistics:
    """Statistics of the queries to come.

    `rope_mean` rotates mean and covariance of un-rotated queries by the mean rotation of the next
    `horizon` positions (Expected Attention, 2510.00636), and so does `mixture`, whose overall
    statistics are the same. `prompt`, `window` (the newest n) and `ema` expect the past to go on,
    rotation included. `future` looks.
    """
    if source.kind == "future":
        return future_statistics(view)
    if source.kind == "ema":
        return moving_average(view, float(source.number or 0), exclude, variance_floor)
    if source.kind == "window":
        first = max(first_counted(view, exclude), view.step - source.count)
        return statistics_of(view.queries(first, view.step))
    if source.kind == "prompt":
        return past_statistics(view, "prompt", exclude)
    return turned(past_statistics(view, "rope_mean", exclude), mean_rotation(view, horizon))
