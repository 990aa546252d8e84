"""Sub-pools: few tokens of a pool, drawn at random, small enough to try every subset of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvtool.errors import KvtoolError
from kvtool.policies.objective import Objective
from kvtool.shapes import expect_shapes


@dataclass(frozen=True, eq=False)
class SubPool:
    """One KV head's sub-pool, treated as the whole cache. All floating numbers are float64.

    Attributes:
        queries: [G, F, D], the group's query heads over the evaluated steps.
        keys: [n, D].
        values: [n, Dv].
        rows: [n] int64, ascending: a later index is a newer token.
        scale, softcap: logit z = scale·q·k, then softcap·tanh(z / softcap).
        sink_logits: [G] logits without a key in the denominator, or None.
        mean: [G, D], the query centre of each query head.
        covariance: [G, D, D] about it.
        objective: the policy's own over these n tokens, H = G heads, weights fixed; None where it has none.
        one_shot: [b] int64 indices into 0..n-1, what the policy keeps when this is its whole view.
        pool_weights: [G, n] weights of the tokens at the centre; None computes them.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    rows: Tensor
    scale: float
    softcap: float | None
    sink_logits: Tensor | None
    mean: Tensor
    covariance: Tensor
    objective: Objective | None
    one_shot: Tensor
    pool_weights: Tensor | None = None

    def __post_init__(self) -> None:
        expect_shapes(
            queries=(self.queries, "G F D"),
            keys=(self.keys, "n D"),
            values=(self.values, "n Dv"),
            rows=(self.rows, "n"),
            sink_logits=(self.sink_logits, "G"),
            mean=(self.mean, "G D"),
            covariance=(self.covariance, "G D D"),
            weights=(None if self.objective is None else self.objective.weights, "G n"),
            ridge=(None if self.objective is None else self.objective.ridge, "G"),
            pool_weights=(self.pool_weights, "G n"),
        )
        if self.rows.numel() > 1 and bool((self.rows.diff() <= 0).any()):
            raise KvtoolError("shape", "the rows of a sub-pool must ascend")

    @property
    def tokens(self) -> int:
        return int(self.keys.shape[0])

    @property
    def heads(self) -> int:
        return int(self.queries.shape[0])


def draw(generator: np.random.Generator, candidates: int, tokens: int, samples: int) -> Tensor:
    """[samples, tokens] int64, sub-pools as ascending indices into 0..candidates-1, without repetition inside each.

    Where there are no more candidates than that, every draw would be the same: one sub-pool [1, candidates]
    of all of them, or none at all [0, tokens] where there are no candidates.

    Raises:
        KvtoolError: code `usage` for sizes below 1.
    """
    if tokens < 1 or samples < 1:
        raise KvtoolError("usage", f"{samples} sub-pools of {tokens} tokens: both must be at least 1")
    if candidates < 1:
        return torch.zeros(0, tokens, dtype=torch.int64)
    if candidates <= tokens:
        return torch.arange(candidates)[None]
    drawn = [np.sort(generator.choice(candidates, tokens, replace=False)) for _ in range(samples)]
    return torch.from_numpy(np.stack(drawn).astype(np.int64))
