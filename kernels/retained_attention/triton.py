"""Error norms of many retained sets by Triton: the numbers of `errors.cell_errors`, on a GPU.

A program owns a block of query rows of one KV head (steps times the query heads of the group) and a few cells. It
walks over the tiles of K and V that its rows can see; the cells share every tile and every q·k, and a token's side
follows from its `evict_step`, compared as it is loaded. Each cell keeps two running softmaxes, retained and evicted,
each with its own maximum, so neither side underflows under the other's logits. Programs of the cells beside are
neighbours in the grid and find K and V in the level 2 cache. Nothing is added atomically: results repeat bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from kvtool.kernels.attention_mass.launch import (
    as_int32,
    expect_fitting,
    in_blocks,
    meeting,
    pieces,
    power_of_two,
)

from .errors import CellErrors
from .head_span import Which
from .norms import STATISTICS, fill_norms, fill_products, hide_unsound, sound_values
from .retained_kernel import retained_kernel

SPAN_BYTES = 256 << 20  # of what the kernel writes for one run of steps
SPAN_BLOCKS = 65535  # of query rows, the most that a grid's second axis holds


@dataclass(frozen=True)
class Tiling:
    """How the work is cut: cells of a program, query rows and keys of a tile, warps, and stages of loading."""

    cells: int
    rows: int
    keys: int
    warps: int
    stages: int


INTERPRETED = not isinstance(retained_kernel, triton.JITFunction)


def tiling_of(dtype: torch.dtype, dim: int, value_dim: int, major: int) -> Tiling:
    """The widest tiles that spill no registers: known from ahead-of-time builds, not from timing.

    Args:
        major: of the compute capability; 10 has tensor memory for accumulators, and so takes larger tiles.
    """
    wide = power_of_two(value_dim) > 128 or dim > 192
    if dtype == torch.float32:
        return Tiling(1, 16, 16, 8, 2) if wide else Tiling(2, 16, 32 if dim <= 128 else 16, 8, 2)
    if major == 10:
        return Tiling(1, 64, 32, 8, 2) if wide else Tiling(2, 64, 64, 8, 2)
    if wide:
        return Tiling(1, 32, 32, 8, 2)
    if max(dim, value_dim) <= 64:
        return Tiling(2, 64, 16, 4, 2)
    if pieces(dim)[1]:
        return Tiling(2, 16, 32, 4, 2)
    return Tiling(2, 32, 16 if dtype == torch.float16 else 32, 8, 2)


def options_of(tiling: Tiling, dtype: torch.dtype, dim: int, value_dim: int, group: int) -> dict[str, Any]:
    """What the kernel is specialised on, apart from which of its optional arguments are there."""
    first, second = pieces(dim)
    return {
        "GROUP": group,
        "D": dim,
        "D1": first,
        "D2": second,
        "DV": value_dim,
        "WIDTH": max(16, power_of_two(value_dim)),
        "CELLS": tiling.cells,
        "BLOCK_M": tiling.rows,
        "BLOCK_N": tiling.keys,
        "UPCAST": INTERPRETED and dtype == torch.bfloat16,  # the interpreter multiplies the bits of bfloat16
        "PRECISION": "tf32x3" if dtype == torch.float32 and not INTERPRETED else "ieee",
        "UNIT": 16384.0 if dtype == torch.float16 else 1.0,
        "num_warps": tiling.warps,
        "num_stages": tiling.stages,
    }


def cell_errors(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    evict_steps: Tensor,
    *,
    steps: Tensor,
    rows: Tensor,
    first_visible: Tensor,
    scale: float,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    projection: Tensor | None = None,
    gradients: Tensor | None = None,
    gradient_rows: Tensor | None = None,
    which: Which = "all",
    full: Tensor | None = None,
    log_sum_exp: Tensor | None = None,
    groups: Sequence[int] | None = None,
    block: int | None = None,
) -> CellErrors:
    """Error norms of every cell at every step, as `errors.cell_errors` gives them, from tensors on one GPU.

    Always e = m (fE - f_R) from both sides of the cut, whichever numbers are asked for.

    Args:
        queries, keys, values: bfloat16, float16 or float32, all alike; the arithmetic is float32. In float32, norms
            of vectors longer than 1e19 overflow.
        full, log_sum_exp: [H, R, Dv], [H, R]; nothing is saved by knowing them, and they are not read.
        groups: not read; a cell's numbers depend on no other cell.
        block: steps whose results are held at once; None chooses.
        The others as in `errors.cell_errors`, on the same device.

    Returns:
        Tensors on that device; `gradient_dot` in float32.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.
    """
    (heads, count, _), (kv_heads, tokens, _) = queries.shape, keys.shape
    cells = len(evict_steps)
    expect_fitting(
        {"queries": queries, "keys": keys, "values": values},
        {
            "evict_steps": (evict_steps, (cells, kv_heads, tokens)),
            "steps": (steps, (count,)),
            "rows": (rows, (tokens,)),
            "first_visible": (first_visible, (count,)),
        },
        softcap,
    )
    device, value_dim = queries.device, values.shape[2]
    if device.type != "cuda" and not INTERPRETED:
        raise ValueError(f"the tensors are on {device}; Triton needs them on a GPU")
    found = _blank(cells, heads, count, device, projection, gradients)
    if not cells or not count:
        return found
    touched = torch.empty(cells, heads, count, dtype=torch.bool, device=device)
    values, unsound = sound_values(values)
    keys, values, leaves = keys.contiguous(), values.contiguous(), as_int32(evict_steps)
    vectors = projection is not None or gradients is not None
    fits = SPAN_BYTES // (4 * heads * (cells * (STATISTICS + 1) + (value_dim if vectors else 0)))
    span = max(1, min(block or count, fits, SPAN_BLOCKS * 16 * kv_heads // heads))  # blocks of 16 rows or more
    together = cells
    if vectors:
        span = min(span, max(64, SPAN_BYTES // (4 * heads * value_dim * cells)))
        together = max(1, min(cells, SPAN_BYTES // (4 * heads * value_dim * span)))
    for start in range(0, count, span):
        part = slice(start, min(start + span, count))
        for first in range(0, cells, together):
            some = slice(first, min(first + together, cells))
            odds, sums, errors, outputs = _launch(
                queries[:, part].contiguous(),
                keys,
                values,
                leaves[some],
                steps[part],
                rows,
                first_visible[part],
                scale,
                softcap,
                sink_logits,
                vectors,
            )
            touched[some, :, part] = odds != float("-inf")
            fill_norms(found, part, some, odds, sums, which == "errors")
            if errors is not None and outputs is not None:
                fill_products(found, part, some, errors, outputs, projection, gradients, gradient_rows)
    if unsound is not None:
        hide_unsound(found, touched, unsound, steps, rows, first_visible)
    return found


def _blank(
    cells: int, heads: int, count: int, device: torch.device, projection: Tensor | None, gradients: Tensor | None
) -> CellErrors:
    """Everything NaN, so that a step that was forgotten shows."""

    def nothing(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.full(shape, float("nan"), dtype=dtype, device=device)

    error, mass, gap, cosine = (nothing(cells, heads, count) for _ in range(4))
    return CellErrors(
        nothing(heads, count),
        error,
        mass,
        gap,
        cosine,
        None if projection is None else nothing(count),
        None if projection is None else nothing(cells, count),
        None if gradients is None else nothing(cells, len(gradients), heads, count, dtype=torch.float32),
    )


def _launch(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    leaves: Tensor,
    steps: Tensor,
    rows: Tensor,
    first_visible: Tensor,
    scale: float,
    softcap: float | None,
    sink_logits: Tensor | None,
    vectors: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """One run of steps: odds [C, H, b], sums [STATISTICS, C, H, b], e [C, H, b, Dv] and f_V [H, b, Dv], float32."""
    (heads, count, dim), (kv_heads, tokens, value_dim) = queries.shape, values.shape
    cells, group, device = len(leaves), heads // kv_heads, queries.device
    major = torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0
    tiling = tiling_of(queries.dtype, dim, value_dim, major)
    owner = torch.arange(count, device=device).repeat_interleave(group)  # the step of each query row
    low, high = meeting(
        in_blocks(first_visible[owner], tiling.rows, largest=False),
        in_blocks(steps[owner], tiling.rows, largest=True),
        in_blocks(rows, tiling.keys, largest=False),
        in_blocks(rows, tiling.keys, largest=True),
    )

    def room(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device)

    odds, sums = room(cells, heads, count), room(STATISTICS, cells, heads, count)
    errors = room(cells, heads, count, value_dim) if vectors else None
    outputs = room(heads, count, value_dim) if vectors else None
    grid: Any = (-(-cells // tiling.cells), len(low), kv_heads)
    retained_kernel[grid](
        queries,
        keys,
        values,
        leaves,
        as_int32(steps),
        as_int32(first_visible),
        as_int32(rows),
        low,
        high,
        None if sink_logits is None else sink_logits.to(torch.float32).contiguous(),
        odds,
        sums,
        errors,
        outputs,
        count,
        tokens,
        cells,
        float(scale),
        1.0 if softcap is None else float(softcap),
        SOFTCAP=softcap is not None,
        SINKS=sink_logits is not None,
        VECTORS=vectors,
        **options_of(tiling, queries.dtype, dim, value_dim, group),
    )
    return odds, sums, errors, outputs
