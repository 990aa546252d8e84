"""All subsets: the damage of every one of the 2^n subsets of a sub-pool, by split masks."""

from __future__ import annotations

import torch
from torch import Tensor

from kvtool.decomposition.damage import Damage
from kvtool.decomposition.search import one_thread
from kvtool.decomposition.split_masks import add_damage
from kvtool.decomposition.subpools import SubPool
from kvtool.errors import KvtoolError

MOST_TOKENS = 24  # 2^24 float64 numbers are 128 MiB


def masks(tokens: int) -> Tensor:
    """[2^n, n] bool, the subset of each number: bit i of the number is token i."""
    return (torch.arange(1 << tokens)[:, None] >> torch.arange(tokens)) % 2 == 1


@one_thread()
def subset_damages(pool: SubPool) -> Tensor:
    """[2^n] float64, sum over query heads and queries of |f_P - f_C|^2 for every subset C of the pool's n tokens.

    The number of a subset has bit i set where it holds token i. Nothing kept leaves the output 0 where there
    is a sink logit, and is infinitely bad without one. One query costs about n/2 operations a subset. Rounding
    as in `Damage.bounds`: a few eps of the largest squared output a query, so differences of damages far below
    that say nothing.

    Raises:
        KvtoolError: code `usage` above 24 tokens.
    """
    if pool.tokens > MOST_TOKENS:
        raise KvtoolError(
            "usage", f"all subsets of {pool.tokens} tokens are {1 << pool.tokens:,}; it stops at {MOST_TOKENS} tokens"
        )
    damage = Damage(pool)
    p, gram, _ = damage.forms
    split = pool.tokens // 2
    older, newer = masks(split).double(), masks(pool.tokens - split).double()
    with_sink = torch.cat([torch.ones(len(older), 1, dtype=torch.float64), older], 1)
    found = torch.zeros(len(older), len(newer), dtype=torch.float64)
    add_damage(found, with_sink, newer, gram, p, 1 + split)
    every = found.T.flatten()
    every[0] = torch.inf if damage.sink_logits is None else damage.energy
    return every
