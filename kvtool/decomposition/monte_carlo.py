"""Monte Carlo: how much a noisy output really tells about which query it came from."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

SATURATED = 0.9  # share of log F above which the number of queries, not the outputs, is measured
BLOCK_DRAWS = 1000


@dataclass(frozen=True, eq=False)
class Draws:
    """Random numbers that serve every policy of a head: differences between policies are then less noisy.

    Attributes:
        queries: [M] int64, which query each draw starts from.
        noise: [M, Dv] float64, standard normal.
    """

    queries: Tensor
    noise: Tensor

    @classmethod
    def from_stream(cls, stream: np.random.Generator, count: int, queries: int, width: int) -> Draws:
        chosen = torch.from_numpy(stream.integers(queries, size=count))
        return cls(chosen, torch.from_numpy(stream.standard_normal((count, width))))


@dataclass(frozen=True)
class Information:
    """Mutual information of one head at one noise.

    Attributes:
        nats: cut to what is possible, 0 to min(log F, the Gaussian capacity).
        standard_error: of the mean over draws, before cutting.
        saturated: more than 0.9 log F.
    """

    nats: float
    standard_error: float
    saturated: bool


def mutual_information(outputs: Tensor, noises: list[float], draws: Draws, most: list[float]) -> list[Information]:
    """I(q; f(q) + noise) for q drawn evenly from F queries, at several noises.

    f(q) + noise is a mixture of F Gaussians, so each draw's information is minus the log of the mean over j of
    exp(-(|f_i - f_j|^2 + 2 sigma n·(f_i - f_j)) / (2 sigma^2)): at most log F, since j = i adds 1 to the sum.

    Args:
        outputs: [F, Dv].
        noises: variances sigma^2 > 0, the same in every channel.
        most: the Gaussian capacity at each noise, which no distribution of this covariance exceeds.
    """
    count = outputs.shape[0]
    if count == 1:
        return [Information(0.0, 0.0, False) for _ in noises]
    around = outputs - outputs.mean(0)  # distances by products lose less around the mean
    square = around.square().sum(1)
    halves = (square[:, None] + square[None, :] - 2 * around @ around.T).clamp_min(0) / 2  # |f_i - f_j|^2 / 2
    halves.fill_diagonal_(0.0)
    told: list[list[Tensor]] = [[] for _ in noises]
    for start in range(0, draws.queries.numel(), BLOCK_DRAWS):
        chosen = draws.queries[start : start + BLOCK_DRAWS]
        along = draws.noise[start : start + BLOCK_DRAWS] @ around.T  # [m, F], n·f_j
        along -= along.gather(1, chosen[:, None])
        apart = halves[chosen]
        for blocks, sigma2 in zip(told, noises, strict=True):
            exponent = torch.add(along / math.sqrt(sigma2), apart, alpha=-1 / sigma2)
            blocks.append(math.log(count) - torch.logsumexp(exponent, dim=1))
    return [_information(torch.cat(blocks), count, limit) for blocks, limit in zip(told, most, strict=True)]


def _information(each: Tensor, count: int, most: float) -> Information:
    nats = max(0.0, min(float(each.mean()), math.log(count), most))
    return Information(nats, float(each.std()) / math.sqrt(each.numel()), nats > SATURATED * math.log(count))
