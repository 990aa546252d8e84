"""Tangents in Triton: J dq and JD dq of many query shifts, in one pass over keys and directions.

At the centre: logits and slopes by `_logits`, their softmax in float64, then kbar = sum_i a_i d_i k_i and
ubar = sum_i a_i u_i by `_means`, in runs of tokens that are added up in float64. For the shifts, `_tangents` reads
every key and direction once per tile of shifts:

    z'_i - zbar = s dq·(d_i k_i - kbar)      so no large shift that all tokens share is computed and then cancelled
    J dq  = sum_i a_i (z'_i - zbar) u_i      JD dq = sum_i a_i (1 - a_i) z'_i u_i,   zbar = s dq·kbar

Storage float32, bfloat16 or float16: dots in tf32x3, sums in float32. Storage float64: dots and sums in float64 (ieee).
No atomics: the same numbers every time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtool.kernels.device import Unsupported
from kvtool.kernels.tangent.reference import Tangent, _check

FLOAT64 = ("tangent_at",)  # has a float64 kernel, so --precision float64 may use it
WIDEST = 256
TOKENS = 32
RUN_TOKENS, MOST_RUNS = 1024, 64


@triton.jit
def _logits(centre, keys, logits, tokens, D: tl.constexpr, P: tl.constexpr, T: tl.constexpr, ACC: tl.constexpr):
    """logits[g, i] = c_g·k_i; centre [G, D], keys [n, D], logits [G, n]; grid (token tiles, G)."""
    at = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T)
    head, dims = tl.program_id(1).to(tl.int64), tl.arange(0, P)
    k = tl.load(keys + at[:, None] * D + dims[None, :], mask=(at < tokens)[:, None] & (dims < D)[None, :], other=0.0)
    c = tl.load(centre + head * D + dims, mask=dims < D, other=0.0)
    tl.store(logits + head * tokens + at, tl.sum(k.to(ACC) * c.to(ACC)[None, :], 1), mask=at < tokens)


@triton.jit
def _means(
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
def _tangents(
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


@dataclass(frozen=True, eq=False)
class Arrays:
    """What the kernel reads, on the card: keys and directions as stored, the rest in float32 (float64 if they are)."""

    keys: Tensor
    directions: Tensor
    weights: Tensor
    alone: Tensor
    slopes: Tensor
    mean_key: Tensor

    @property
    def wide(self) -> bool:
        return self.weights.dtype == torch.float64


@dataclass(frozen=True, eq=False)
class CardTangent(Tangent):  # type: ignore[misc]
    """A tangent whose products run on the card; shifts may lie anywhere, and answers come back to where they lie."""

    arrays: Arrays

    def home(self) -> CardTangent:
        """The same with what a caller reads on the CPU; keys and directions stay."""
        told = {name: getattr(self, name).cpu() for name in ("weights", "sink_weight", "slopes", "output")}
        return replace(self, **told)

    def both(self, shift: Tensor) -> tuple[Tensor, Tensor]:
        """J dq and JD dq, [G, F, Dv] each, of the shifts [G, F, D]."""
        arrays, place = self.arrays, self.arrays.keys.device
        kind = arrays.weights.dtype
        # A number handed to a kernel is a float32, so the scale goes in here.
        dq = (shift.to(place, kind) * self.scale).contiguous()
        heads, count = dq.shape[:2]
        found = [torch.empty(heads, count, arrays.directions.shape[1], dtype=kind, device=place) for _ in range(2)]
        if count and heads:
            _launch(arrays, dq, found)
        return tuple(one.to(shift.device, self.weights.dtype) for one in found)  # type: ignore[return-value]

    def full(self, shift: Tensor) -> Tensor:
        """[G, F, Dv], J dq."""
        return self.both(shift)[0]

    def diagonal(self, shift: Tensor) -> Tensor:
        """[G, F, Dv], JD dq."""
        return self.both(shift)[1]

    def full_matrix(self) -> Tensor:
        """[G, Dv, D], J: its columns are J of the unit shifts."""
        return self.full(self._units()).transpose(1, 2).contiguous()

    def diagonal_matrix(self) -> Tensor:
        """[G, Dv, D], JD."""
        return self.diagonal(self._units()).transpose(1, 2).contiguous()

    def _units(self) -> Tensor:
        heads, width = self.weights.shape[0], self.keys.shape[1]
        return torch.eye(width, dtype=self.weights.dtype, device=self.weights.device).expand(heads, -1, -1)


def _launch(arrays: Arrays, dq: Tensor, found: list[Tensor]) -> None:
    (heads, count, width), values = dq.shape, arrays.directions.shape[1]
    block = WIDE_BLOCK if arrays.wide else BLOCK
    _tangents[(triton.cdiv(count, block["F"]), triton.cdiv(values, block["V"]), heads)](
        dq,
        arrays.keys,
        arrays.directions,
        arrays.weights,
        arrays.alone,
        arrays.slopes,
        arrays.mean_key,
        *found,
        count,
        arrays.keys.shape[0],
        D=width,
        DV=values,
        **block,
        **HOW,
    )


BLOCK: dict[str, Any] = {"F": 32, "T": TOKENS, "V": 64, "C": 32, "ACC": tl.float32, "PRECISION": "tf32x3"}
WIDE_BLOCK: dict[str, Any] = {"F": 32, "T": TOKENS, "V": 32, "C": 32, "ACC": tl.float64, "PRECISION": "ieee"}
HOW: dict[str, Any] = {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": True}


def tangent_at(
    centre: Tensor,
    keys: Tensor,
    directions: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
) -> Tangent:
    """As `kvtool.kernels.tangent.reference.tangent_at`, on any device that Triton runs on.

    Raises:
        ValueError: shapes that do not fit.
        Unsupported: for keys or directions wider than 256.
    """
    _check(centre[:, None], keys, directions, sink_logits)
    width, values, heads = keys.shape[1], directions.shape[1], centre.shape[0]
    if max(width, values) > WIDEST:
        raise Unsupported(f"keys of {width} and directions of {values} numbers, and the kernel holds {WIDEST}")
    kind = torch.float64 if torch.float64 in (centre.dtype, keys.dtype, directions.dtype) else torch.float32
    keys, directions = _stored(keys, kind), _stored(directions, kind)
    tokens = keys.shape[0]
    logits = torch.empty(heads, tokens, dtype=kind, device=keys.device)
    acc = tl.float64 if kind == torch.float64 else tl.float32
    if tokens:
        _logits[(triton.cdiv(tokens, TOKENS), heads)](
            (centre.to(kind) * scale).contiguous(),
            keys,
            logits,
            tokens,
            D=width,
            P=triton.next_power_of_2(width),
            T=TOKENS,
            ACC=acc,
            **HOW,
        )
    wide = logits.to(torch.float64)
    wide = wide if softcap is None else softcap * torch.tanh(wide / softcap)
    slopes = torch.ones_like(wide) if softcap is None else 1 - (wide / softcap).square()
    sink = torch.full((heads, 1), -torch.inf, dtype=torch.float64, device=keys.device)
    if sink_logits is not None:
        sink = sink_logits.to(torch.float64)[:, None]
    whole = torch.cat([wide, sink], 1)
    shares = torch.softmax(whole, 1) if sink_logits is not None or tokens else torch.zeros_like(whole)
    weights, sink_weight = shares[:, :-1], shares[:, -1]
    mean_key = _mean(keys, weights * slopes, kind, acc)
    output = _mean(directions, weights, kind, acc)
    alone = weights * (1 - weights)
    arrays = Arrays(keys, directions, *(one.to(kind).contiguous() for one in (weights, alone, slopes, mean_key)))
    told = (weights.to(kind), sink_weight.to(kind), slopes.to(kind), output.to(kind))
    return CardTangent(keys, directions, scale, *told, arrays=arrays)


def _stored(array: Tensor, kind: torch.dtype) -> Tensor:
    """As it is stored where that is a storage type of the kernel, else in its arithmetic."""
    narrow = array.dtype in (torch.bfloat16, torch.float16) and kind == torch.float32
    return (array if narrow else array.to(kind)).contiguous()


def _mean(numbers: Tensor, weights: Tensor, kind: torch.dtype, acc: Any) -> Tensor:
    """[G, D] float64, sum_i w_gi x_i of `numbers` [n, D] and `weights` [G, n]."""
    (heads, tokens), width = weights.shape, numbers.shape[1]
    if not tokens:
        return torch.zeros(heads, width, dtype=torch.float64, device=numbers.device)
    run = max(RUN_TOKENS, triton.cdiv(triton.cdiv(tokens, MOST_RUNS), TOKENS) * TOKENS)
    runs = triton.cdiv(tokens, run)
    partial = torch.empty(runs, heads, width, dtype=kind, device=numbers.device)
    _means[(heads, runs)](
        numbers,
        weights.to(kind).contiguous(),
        partial,
        tokens,
        run,
        D=width,
        P=triton.next_power_of_2(width),
        T=TOKENS,
        ACC=acc,
        **HOW,
    )
    return partial.to(torch.float64).sum(0)
