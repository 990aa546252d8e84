"""Pieces that Triton's attention kernels share: the logits of one tile of queries and keys, and who sees what."""

from __future__ import annotations

import triton
import triton.language as tl

NEVER = tl.constexpr(2147483647)  # a row no step reaches; the step at which a token that is never evicted leaves
NOTHING = tl.constexpr(float("-inf"))
TANH_SERIES_BELOW = tl.constexpr(0.25)


@triton.jit
def load_rows(base, index, valid, column: tl.constexpr, width: tl.constexpr, dim: tl.constexpr, UPCAST: tl.constexpr):
    """Rows `index` [n] of an array [., dim], columns column..column+width-1, as [n, width]; 0 beyond."""
    at = column + tl.arange(0, width)
    tile = tl.load(base + index[:, None] * dim + at[None, :], mask=valid[:, None] & (at < dim)[None, :], other=0.0)
    return tile.to(tl.float32) if UPCAST else tile


@triton.jit
def load_columns(
    base, index, valid, column: tl.constexpr, width: tl.constexpr, dim: tl.constexpr, UPCAST: tl.constexpr
):
    """The same, transposed: [width, n]."""
    at = column + tl.arange(0, width)
    tile = tl.load(base + index[None, :] * dim + at[:, None], mask=valid[None, :] & (at < dim)[:, None], other=0.0)
    return tile.to(tl.float32) if UPCAST else tile


@triton.jit
def tanh(x):
    """To a few units in the last place of its result; neither overflows nor loses small arguments."""
    size = tl.abs(x)
    below = tl.exp(-2.0 * size)
    far = (1.0 - below) / (1.0 + below)
    square = size * size
    # Odd Taylor series: 1 - exp(-2x) would lose the digits of a small x.
    series = 1.0 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835))))
    size = tl.where(size < TANH_SERIES_BELOW, size * series, far)
    return tl.where(x < 0, -size, size)


@triton.jit
def scaled(products, scale, softcap, SOFTCAP: tl.constexpr):
    """Logits from q·k."""
    logits = products * scale
    if SOFTCAP:
        logits = softcap * tanh(logits / softcap)
    return logits


@triton.jit
def sees(row, step, first):
    """[m, n] whether the query of each step sees the key of each row."""
    return (row[None, :] <= step[:, None]) & (row[None, :] >= first[:, None])


@triton.jit
def finite_shift(top):
    """A maximum that can be subtracted: 0 over nothing, since -inf - -inf is NaN."""
    return tl.where(top == NOTHING, 0.0, top)
