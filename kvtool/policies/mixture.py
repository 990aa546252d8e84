"""Mixture: the expected queries as several kinds instead of one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvtool.policies.query_statistics import QueryStatistics, first_counted, mean_rotation, statistics_of, turned
from kvtool.view import View

ROUNDS = 50  # of reassignment; a few dozen settle even thousands of queries


@dataclass(frozen=True, eq=False)
class Component:
    """One kind of query of one query head.

    Attributes:
        share: of the head's queries, above 0; the shares of a head add up to 1.
        mean: [D] float64.
        covariance: [D, D] float64, about the mean.
        newest: whether the newest query is of this kind.
    """

    share: float
    mean: Tensor
    covariance: Tensor
    newest: bool = True


def clusters(points: Tensor, count: int) -> Tensor:
    """[n] int64, the cluster of every point [n, D]: Lloyd's k-means, the same on every run.

    Starts from the point nearest to the mean, then repeatedly the point farthest from all centres
    so far (the earliest of equals). Clusters may stay empty, for instance where points coincide.
    """
    distance = (points - points.mean(0)).square().sum(1)
    chosen = [int(distance.argmin())]
    nearest = (points - points[chosen[0]]).square().sum(1)
    while len(chosen) < count and bool(nearest.max() > 0):
        chosen.append(int((nearest == nearest.max()).nonzero()[0, 0]))
        nearest = torch.minimum(nearest, (points - points[chosen[-1]]).square().sum(1))
    centres = points[chosen].clone()
    assigned = torch.full((len(points),), -1)
    for _ in range(ROUNDS):
        squared = points.square().sum(1, keepdim=True) - 2 * points @ centres.T + centres.square().sum(1)
        nearest_centre = squared.argmin(1)
        if torch.equal(nearest_centre, assigned):
            break
        assigned = nearest_centre
        for index in range(len(centres)):
            members = points[assigned == index]
            if len(members):
                centres[index] = members.mean(0)
    return assigned


def mixture_of(view: View, count: int, exclude: int, horizon: int) -> list[list[Component]]:
    """Per query head up to `count` kinds of un-rotated past queries, turned by the mean rotation to come.

    One component is exactly `rope_mean`. Un-rotated, because rotated queries would cluster by position.
    """
    queries = view.unrotated_queries(first_counted(view, exclude), view.step)  # [H, n, D]
    turn = mean_rotation(view, horizon)
    found = []
    for head in queries:
        points = head.to(torch.float64)
        assigned = clusters(points, count)
        components = []
        for index in assigned.unique().tolist():
            members = points[assigned == index]
            local: QueryStatistics = turned(statistics_of(members[None]), turn)
            share, newest = len(members) / len(points), index == int(assigned[-1])
            components.append(Component(share, local.mean[0], local.covariance[0], newest))
        found.append(components)
    return found
