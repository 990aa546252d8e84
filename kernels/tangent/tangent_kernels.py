"""Programs of tangents: logits and means at a centre, and products with shifts; see `triton` beside this file."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def logits_kernel(centre, keys, logits, tokens, D: tl.constexpr, P: tl.constexpr, T: tl.constexpr, ACC: tl.constexpr):
    """logits[g, i] = c_g·k_i; centre [G, D], keys [n, D], logits [G, n]; grid (token tiles, G)."""
    at = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T)
    head, dims = tl.program_id(1).to(tl.int64), tl.arange(0, P)
    k = tl.load(keys + at[:, None] * D + dims[None, :], mask=(at < tokens)[:, None] & (dims < D)[None, :], other=0.0)
    c = tl.load(centre + head * D + dims, mask=dims < D, other=0.0)
    tl.store(logits + head * tokens + at, tl.sum(k.to(ACC) * c.to(ACC)[None, :], 1), mask=at < tokens)


@triton.jit
def means_kernel(
    numbers, weights, partial, tokens, run, D: tl.constexpr, P: tl.constexpr, T: tl.constexpr, ACC: tl.constexpr
):
    """partial[r, g, :] = sum over the tokens of run r of w_gi x_i; numbers [n, D], weights [G, n],
    partial [runs, G, D]; grid (G, runs)."""
    head, part, dims = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.arange(0, P)
    total = tl.zeros([P], dtype=ACC)
    for start in range(part * run, tl.minimum(part * run + run, tokens), T):
        at = start + tl.arange(0, T)
        there = (at < tokens) & (at < part * run + run)
        x = tl.load(numbers + at[:, None] * D + dims[None, :], mask=there[:, None] & (dims < D)[None, :], other=0.0)
        w = tl.load(weights + head * tokens + at, mask=there, other=0.0)
        total += tl.sum(x.to(ACC) * w[:, None], 0)
    tl.store(partial + (part * tl.num_programs(0) + head) * D + dims, total, mask=dims < D)


@triton.jit
def tangents_kernel(
    shift,
    keys,
    directions,
    weights,
    alone,
    slopes,
    mean_key,
    full,
    diagonal,
    shifts,
    tokens,
    D: tl.constexpr,
    DV: tl.constexpr,
    F: tl.constexpr,
    T: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """full[g, f, :] = J dq and diagonal[g, f, :] = JD dq.

    shift s dq [G, F, D], keys [n, D], directions [n, Dv], weights a, alone a (1 - a) and slopes d [G, n], mean_key kbar
    [G, D], full and diagonal [G, F, Dv]; grid (shift tiles, direction tiles, G).
    """
    head = tl.program_id(2).to(tl.int64)
    f = tl.program_id(0) * F + tl.arange(0, F)
    v = tl.program_id(1) * V + tl.arange(0, V)
    moved = shift + head * shifts * D + f[:, None].to(tl.int64) * D
    shared = tl.zeros([F], dtype=ACC)  # zbar
    for start in range(0, D, C):
        d = start + tl.arange(0, C)
        dq = tl.load(moved + d[None, :], mask=(f < shifts)[:, None] & (d < D)[None, :], other=0.0)
        shared += tl.sum(dq * tl.load(mean_key + head * D + d, mask=d < D, other=0.0)[None, :], 1)
    competing, single = tl.zeros([F, V], dtype=ACC), tl.zeros([F, V], dtype=ACC)
    for first in range(0, tokens, T):
        at = (first + tl.arange(0, T)).to(tl.int64)
        there = at < tokens
        slope = tl.load(slopes + head * tokens + at, mask=there, other=0.0)
        response = tl.zeros([F, T], dtype=ACC)
        for start in range(0, D, C):
            d = start + tl.arange(0, C)
            dq = tl.load(moved + d[None, :], mask=(f < shifts)[:, None] & (d < D)[None, :], other=0.0)
            k = tl.load(keys + at[None, :] * D + d[:, None], mask=there[None, :] & (d < D)[:, None], other=0.0)
            mean = tl.load(mean_key + head * D + d, mask=d < D, other=0.0)
            centred = k.to(ACC) * slope[None, :] - mean[:, None]  # [C, T]
            response = tl.dot(dq, centred, response, input_precision=PRECISION, out_dtype=ACC)
        a = tl.load(weights + head * tokens + at, mask=there, other=0.0)
        b = tl.load(alone + head * tokens + at, mask=there, other=0.0)
        u = tl.load(directions + at[:, None] * DV + v[None, :], mask=there[:, None] & (v < DV)[None, :], other=0.0).to(
            ACC
        )
        competing = tl.dot(response * a[None, :], u, competing, input_precision=PRECISION, out_dtype=ACC)
        both = (response + shared[:, None]) * b[None, :]
        single = tl.dot(both, u, single, input_precision=PRECISION, out_dtype=ACC)
    out = (head * shifts + f[:, None].to(tl.int64)) * DV + v[None, :]
    inside = (f < shifts)[:, None] & (v < DV)[None, :]
    tl.store(full + out, competing, mask=inside)
    tl.store(diagonal + out, single, mask=inside)
