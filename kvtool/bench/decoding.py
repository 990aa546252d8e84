"""Decoding rows: a schedule with an event every 128 steps against a loop over the steps."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from kvtool.bench.attention import agreeing
from kvtool.bench.cells import squared_errors
from kvtool.bench.goals import Measured
from kvtool.bench.plain_attention import log_sum_exps, steps_errors
from kvtool.bench.situation import Situation
from kvtool.bench.synthetic import LLAMA, RECENT, SINKS, Case, arrays

TOKENS, EVERY, BUDGET, CELLS = 8192, 128, 1024, 50


def decode_case(tokens: int) -> tuple[Case, Tensor]:
    """One KV head of a decode run and f_V [H, T, Dv] of every step."""
    made = Case(*arrays(LLAMA, tokens, tokens, 0), scale=LLAMA.dim**-0.5)
    queries = made.queries
    keys, values = (x.expand(queries.shape[0], -1, -1)[None] for x in (made.keys, made.values))
    return made, sdpa(queries[None], keys, values, is_causal=True, scale=made.scale)[0]


def schedule(tokens: int, every: int, budget: int, cells: int, seed: int = 0) -> Tensor:
    """[C, 1, T] evict_step: before every `every`-th step each cell keeps the `budget` tokens that it ranks best,
    sinks and newest among them; an importance of its own and an ageing of its own decide."""
    make = torch.Generator().manual_seed(seed)
    found = torch.full((cells, 1, tokens), tokens)
    for leaves in found[:, 0]:
        score = torch.randn(tokens, generator=make) + float(torch.rand(1, generator=make)) * 4 * (
            torch.arange(tokens) / tokens
        )
        score[:SINKS] = torch.inf
        for step in range(every, tokens, every):
            live = (leaves[:step] == tokens).nonzero()[:, 0]
            if len(live) <= budget:
                continue
            mine = score[live].clone()
            mine[-RECENT:] = torch.inf
            leaves[live[mine.argsort(descending=True, stable=True)[budget:]]] = step
    return found


def at_8k(here: Situation) -> dict[str, Measured]:
    """One cell, and 50 that share what can be shared; f_V is given to both sides."""
    return _compared(here, TOKENS, EVERY, BUDGET, CELLS)


def _compared(here: Situation, tokens: int, every: int, budget: int, count: int) -> dict[str, Measured]:
    made, full = decode_case(tokens)
    cells = schedule(tokens, every, budget, count)
    since = budget  # before, nothing was ever evicted
    steps = torch.arange(since, tokens)
    case = Case(made.queries[:, since:].contiguous(), made.keys, made.values, made.scale)
    given, sums = full[:, since:].contiguous(), log_sum_exps(case, steps)
    agreeing(
        squared_errors(case, cells[:1], given, sums, steps=steps)[0],
        steps_errors(case, cells[0], steps, given),
        "decoding",
    )
    parts = {
        "loop": lambda: steps_errors(case, cells[0], steps, given),
        "kvtool, one cell": lambda: squared_errors(case, cells[:1], given, sums, steps=steps),
    }
    shape = {
        "tokens": tokens,
        "every": every,
        "budget": budget,
        "steps": len(steps),
        "dim": LLAMA.dim,
        "query_heads": 4,
    }
    found = {}
    if here.wants("decode_against_steps"):
        rounds = here.watch.paired(parts, 12.0)
        found["decode_against_steps"] = rounds.ratio("loop", "kvtool, one cell", **shape)
    if here.wants("decode_50_cells"):
        rounds = here.watch.paired(
            {"loop": parts["loop"], "kvtool, all cells": lambda: squared_errors(case, cells, given, sums, steps=steps)},
            30.0,
        )
        found["decode_50_cells"] = rounds.ratio("loop", "kvtool, all cells", float(count), **shape, cells=count)
    return found
