"""Attention rows: error norms of many retained sets against SDPA, dense, masked and gathered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvtool.bench.cells import errors_of, squared_errors
from kvtool.bench.goals import Measured
from kvtool.bench.plain_attention import dense_outputs, gathered_errors, log_sum_exps, masked_errors
from kvtool.bench.situation import Situation
from kvtool.bench.synthetic import LLAMA, POLICIES, RATIOS, Case, case, nested, orders
from kvtool.errors import KvtoolError

QUERIES = 512
CHANNELS, DRAWS = 4096, 4  # of the output projection, of gradients
MANY_RATIOS = tuple(0.5 + 0.45 * i / 19 for i in range(20))
AGREE = 1e-4  # of the largest squared error: two sides that differ by more do not measure the same


def at_8k(here: Situation) -> dict[str, Measured]:
    """Everything at 8,192 tokens: the cells against one dense pass, and against a pass for each."""
    return _cells(here, case(LLAMA, 8192, QUERIES), "_8k")


def at_32k(here: Situation) -> dict[str, Measured]:
    """The cells against one dense pass at 32,768 tokens."""
    return _cells(here, case(LLAMA, 32768, QUERIES), "_32k")


def _cells(here: Situation, made: Case, suffix: str) -> dict[str, Measured]:
    cells = nested(orders(made, POLICIES), RATIOS, made.never)
    full, sums = dense_outputs(made), log_sum_exps(made)
    name = f"output_errors{suffix}"
    parts: dict[str, Callable[[], Any]] = {
        "kvtool": lambda: squared_errors(made, cells, full, sums),
        "dense SDPA": lambda: dense_outputs(made),
    }
    if here.wants("against_gathered_sdpa") and suffix == "_8k":
        parts["gathered SDPA"] = lambda: gathered_errors(made, cells, full)
    if here.wants("against_masked_sdpa") and suffix == "_8k":
        parts["masked SDPA"] = lambda: masked_errors(made, cells, full)
    agreeing(squared_errors(made, cells, full, sums), gathered_errors(made, cells, full), name)
    rounds = here.watch.paired(parts, 20.0 + 30.0 * ("masked SDPA" in parts))
    found = {name: rounds.ratio("kvtool", "dense SDPA", **shape_of(made, cells))}
    for other, part in (("against_masked_sdpa", "masked SDPA"), ("against_gathered_sdpa", "gathered SDPA")):
        if part in parts:
            found[other] = rounds.ratio(part, "kvtool", **shape_of(made, cells))
    return found | _further(here, made, cells, full, sums, name)


def _further(here: Situation, made: Case, cells: Tensor, full: Tensor, sums: Tensor, name: str) -> dict[str, Measured]:
    """The same beside an output projection, and beside gradients, where somebody wants to know."""
    heads, count, width = full.shape
    make = torch.Generator().manual_seed(1)
    found = {}
    if here.wants(f"{name}_layer"):
        projection = torch.randn(heads, width, CHANNELS, generator=make) / (heads * width) ** 0.5
        rounds = here.watch.paired(
            {
                "kvtool": lambda: errors_of(made, cells, full, sums, projection=projection),
                "dense SDPA": lambda: dense_outputs(made),
            },
            12.0,
        )
        found[f"{name}_layer"] = rounds.ratio("kvtool", "dense SDPA", channels=CHANNELS, **shape_of(made, cells))
    if here.wants(f"{name}_kl"):
        gradients = torch.randn(DRAWS, heads, count, width, generator=make)
        rounds = here.watch.paired(
            {
                "kvtool": lambda: errors_of(made, cells, full, sums, gradients=gradients),
                "dense SDPA": lambda: dense_outputs(made),
            },
            12.0,
        )
        found[f"{name}_kl"] = rounds.ratio("kvtool", "dense SDPA", draws=DRAWS, **shape_of(made, cells))
    return found


def many_ratios(here: Situation) -> dict[str, Measured]:
    """200 cells against gathered SDPA: further ratios of a ranking are nearly free."""
    made = case(LLAMA, 8192, QUERIES)
    cells = nested(orders(made, POLICIES), MANY_RATIOS, made.never)
    full, sums = dense_outputs(made), log_sum_exps(made)
    rounds = here.watch.paired(
        {
            "gathered SDPA": lambda: gathered_errors(made, cells, full),
            "kvtool": lambda: squared_errors(made, cells, full, sums),
        },
        25.0,
    )
    return {"against_gathered_sdpa_20_ratios": rounds.ratio("gathered SDPA", "kvtool", **shape_of(made, cells))}


def on_case(here: Situation, made: Case, seconds: float) -> dict[str, Measured]:
    """The same comparisons on arrays of any shape, such as a stored layer's."""
    cells = nested(orders(made, POLICIES), RATIOS, made.never)
    full, sums = dense_outputs(made), log_sum_exps(made)
    parts: dict[str, Callable[[], Any]] = {
        "kvtool": lambda: squared_errors(made, cells, full, sums),
        "dense SDPA": lambda: dense_outputs(made),
        "gathered SDPA": lambda: gathered_errors(made, cells, full),
        "masked SDPA": lambda: masked_errors(made, cells, full),
    }
    agreeing(squared_errors(made, cells, full, sums), gathered_errors(made, cells, full), "attention on the trace")
    rounds = here.watch.paired(parts, seconds)
    shape = shape_of(made, cells)
    return {
        "output_errors": rounds.ratio("kvtool", "dense SDPA", **shape),
        "against_masked_sdpa": rounds.ratio("masked SDPA", "kvtool", **shape),
        "against_gathered_sdpa": rounds.ratio("gathered SDPA", "kvtool", **shape),
    }


def shape_of(made: Case, cells: Tensor) -> dict[str, Any]:
    """What was timed, for the entry."""
    return {
        "query_heads": int(made.queries.shape[0]),
        "kv_heads": int(made.keys.shape[0]),
        "dim": int(made.keys.shape[2]),
        "tokens": made.tokens,
        "queries": int(made.queries.shape[1]),
        "cells": int(cells.shape[0]),
    }


def agreeing(mine: Tensor, plain: Tensor, what: str) -> None:
    """Raises KvtoolError `internal` where both sides of a comparison found other numbers."""
    off = float((mine.double() - plain.double()).abs().max() / plain.double().abs().max().clamp_min(1e-300))
    if not off <= AGREE:
        raise KvtoolError("internal", f"{what}: both sides of the comparison differ by {off:.1g} of the largest number")
