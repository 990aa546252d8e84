"""Tangents in Triton: J dq and JD dq of many query shifts, in one pass over keys and directions.

At the centre: logits and slopes by `logits_kernel`, their softmax in float64, then kbar = sum_i a_i d_i k_i and
ubar = sum_i a_i u_i by `means_kernel`, in runs of tokens that are added up in float64. For the shifts,
`tangents_kernel` reads every key and direction once per tile of shifts:

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
from kvtool.kernels.tangent.tangent_kernels import logits_kernel, means_kernel, tangents_kernel

FLOAT64 = ("tangent_at",)  # has a float64 kernel, so --precision float64 may use it
WIDEST = 256
TOKENS = 32
RUN_TOKENS, MOST_RUNS = 1024, 64


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
    tangents_kernel[(triton.cdiv(count, block["F"]), triton.cdiv(values, block["V"]), heads)](
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
        logits_kernel[(triton.cdiv(tokens, TOKENS), heads)](
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
    means_kernel[(heads, runs)](
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
