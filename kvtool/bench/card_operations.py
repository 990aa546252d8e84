"""Card operations: what is asked of every Triton kernel, what it is held against, and the least it must move and add.

Checks are small and of awkward sizes, in float64 on the CPU from the very numbers that the card reads; the work that
is timed is of a Llama-8B-like layer.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvtool.bench.plain_attention import dense_outputs, gathered_errors
from kvtool.bench.synthetic import POLICIES, RATIOS, Case, Heads, case, nested, orders
from kvtool.kernels.attention_mass import reference as mass_reference
from kvtool.kernels.leverage import reference as leverage_reference
from kvtool.kernels.retained_attention.errors import cell_errors as cell_errors_reference
from kvtool.kernels.tangent import reference as tangent_reference

LAYER = Heads("Llama-8B-like", 32, 8, 128)
AWKWARD = Heads("awkward", 6, 2, 80)
TOKENS, LONG, QUERIES, SHIFTS = 8192, 32768, 512, 512
ALLOWED = {torch.bfloat16: 8e-3, torch.float32: 1e-4}  # of a row's size: products in the storage dtype, sums in float32
MASS_BLOCK = 64


@dataclass(frozen=True)
class Check:
    """How far a kernel's worst row is from the reference, relative to the row's size, and how far it may be."""

    worst: float
    allowed: float


@dataclass(frozen=True)
class Work:
    """One call to time.

    Attributes:
        kernel: the call.
        others: name -> the same answer by plain torch on the card.
        bytes: that must be read and written at least, each number once.
        flops: that the answer takes at least.
        dtype: of the products.
    """

    kernel: Callable[[], object]
    others: dict[str, Callable[[], object]]
    bytes: int
    flops: int
    dtype: torch.dtype


def kernel(operation: str, name: str) -> Callable[..., Any]:
    """The Triton version of an operation.

    Raises:
        ImportError: where there is none.
    """
    module = importlib.import_module(f"kvtool.kernels.{operation}.triton")
    if not hasattr(module, name):
        raise ImportError(f"{operation} has no {name}")
    found: Callable[..., Any] = getattr(module, name)
    return found


def _how(made: Case, place: str) -> dict[str, Any]:
    at = made.steps.to(place)
    return {
        "steps": at,
        "rows": torch.arange(made.tokens, device=place),
        "first_visible": torch.zeros_like(at),
        "scale": made.scale,
    }


def _stored(made: Case, place: str, dtype: torch.dtype) -> Case:
    queries, keys, values = (x.to(place, dtype) for x in (made.queries, made.keys, made.values))
    return Case(queries, keys, values, made.scale)


def _wide(made: Case) -> Case:
    return _stored(made, "cpu", torch.float64)


def cell_errors_check(place: str, tokens: int = 1111, queries: int = 70) -> Check:
    """|e| of the worst row, over that row's |f_V| and |e| together."""
    made = _stored(case(AWKWARD, tokens, queries), place, torch.bfloat16)
    plain = _wide(made)
    cells = nested(orders(case(AWKWARD, tokens, queries), 2), RATIOS, made.never)
    mine = kernel("retained_attention", "cell_errors")(
        made.queries, made.keys, made.values, cells.to(place), **_how(made, place)
    )
    right = cell_errors_reference(plain.queries, plain.keys, plain.values, cells, **_how(plain, "cpu"))
    apart = (mine.squared_error.cpu().sqrt() - right.squared_error.sqrt()).abs()
    return _check(apart / (right.squared_error + right.squared_output).sqrt(), torch.bfloat16)


def cell_errors_work(place: str) -> Work:
    """10 policies x 5 ratios of a layer; the flops are those of logits once and of each ranking's largest set."""
    host = case(LAYER, TOKENS, QUERIES)
    made, cells = _stored(host, place, torch.bfloat16), nested(orders(host, POLICIES), RATIOS, host.never).to(place)
    run, how = kernel("retained_attention", "cell_errors"), _how(made, place)
    full = dense_outputs(made)
    heads, count, dim = made.queries.shape
    kept = round((1 - min(RATIOS)) * TOKENS)
    return Work(
        lambda: run(made.queries, made.keys, made.values, cells, which="errors", full=full, **how),
        {
            "dense": lambda: dense_outputs(made),
            "gathered": lambda: gathered_errors(made, cells, full),
        },
        _bytes(made.queries, made.keys, made.values, cells) + 8 * len(cells) * heads * count,
        2 * heads * count * dim * (TOKENS + POLICIES * kept),
        torch.bfloat16,
    )


def attention_mass_check(place: str, tokens: int = 1111, queries: int = 70) -> Check:
    """The worst token's mass, over the mean of its head."""
    made = _stored(case(AWKWARD, tokens, queries), place, torch.bfloat16)
    plain = _wide(made)
    mine = kernel("attention_mass", "attention_mass")(made.queries, made.keys, **_how(made, place)).cpu()
    right = mass_reference.attention_mass(plain.queries, plain.keys, **_how(plain, "cpu"))
    return _check((mine - right).abs() / (right + right.mean(1, keepdim=True)), torch.bfloat16)


def attention_mass_work(place: str) -> Work:
    """Column sums of a layer's attention by its queries; logits once are the least."""
    made = _stored(case(LAYER, TOKENS, QUERIES), place, torch.bfloat16)
    run, how = kernel("attention_mass", "attention_mass"), _how(made, place)
    heads, count, dim = made.queries.shape
    return Work(
        lambda: run(made.queries, made.keys, **how),
        {"softmax": lambda: plain_mass(made)},
        _bytes(made.queries, made.keys) + 8 * heads * TOKENS,
        2 * heads * count * dim * TOKENS,
        torch.bfloat16,
    )


def plain_mass(made: Case) -> Tensor:
    """[H, N] float64 by matmul, softmax and sum, `MASS_BLOCK` queries of every head at a time."""
    heads, count, dim = made.queries.shape
    kv_heads = made.keys.shape[0]
    mass = torch.zeros(heads, made.tokens, dtype=torch.float64, device=made.keys.device)
    for start in range(0, count, MASS_BLOCK):
        queries = made.queries[:, start : start + MASS_BLOCK]
        logits = queries.reshape(kv_heads, -1, dim) @ made.keys.transpose(1, 2) * made.scale
        mass += logits.float().softmax(-1).view(heads, -1, made.tokens).sum(1)
    return mass


def _directions(heads: int, kv_heads: int, tokens: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    make = torch.Generator().manual_seed(0)
    u = torch.randn(kv_heads, tokens, dim, generator=make)
    w = torch.rand(heads, tokens, generator=make, dtype=torch.float64).pow_(4)
    return u, w, w.mean(1)


def leverage_check(place: str, tokens: int = 1111) -> Check:
    """The worst score, over the largest of its head."""
    u, w, ridge = _directions(6, 2, tokens, 80)
    mine = kernel("leverage", "leverage_scores")(u.to(place), w.to(place), ridge.to(place)).scores.cpu()
    right = leverage_reference.leverage_scores(u, w, ridge).scores
    return _check((mine - right).abs() / right.amax(1, keepdim=True), torch.float32)


def leverage_work(place: str) -> Work:
    """Directions are read twice, once for the matrix and once for the scores."""
    u, w, ridge = (x.to(place) for x in _directions(LAYER.query_heads, LAYER.kv_heads, LONG, LAYER.dim))
    run = kernel("leverage", "leverage_scores")
    return Work(
        lambda: run(u, w, ridge),
        {"linalg": lambda: batched_leverage(u, w, ridge)},
        2 * _bytes(u) + 2 * _bytes(w),
        4 * LAYER.query_heads * LONG * LAYER.dim**2,
        torch.float32,
    )


def batched_leverage(directions: Tensor, weights: Tensor, ridge: Tensor) -> Tensor:
    """[H, N] by one batched factorisation and one batched triangular solve, float32."""
    u = directions.repeat_interleave(len(weights) // len(directions), 0)
    w = weights.to(u.dtype)
    matrix = u.transpose(1, 2) @ (w[..., None] * u)
    matrix.diagonal(dim1=1, dim2=2).add_(ridge.to(u.dtype)[:, None])
    factor, _ = torch.linalg.cholesky_ex(matrix)
    whitened: Tensor = torch.linalg.solve_triangular(factor, u.transpose(1, 2), upper=False)
    return w * whitened.square().sum(1)


def _tangent_inputs(heads: int, tokens: int, dim: int, shifts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    make = torch.Generator().manual_seed(0)
    sizes = ((heads, dim), (tokens, dim), (tokens, dim), (heads, shifts, dim))
    centre, keys, directions, shift = (torch.randn(size, generator=make) for size in sizes)
    return centre, keys, directions, shift


def tangent_check(place: str, tokens: int = 1111) -> Check:
    """The worst shift's full or diagonal tangent, over its length."""
    centre, keys, directions, shift = _tangent_inputs(3, tokens, 80, 63)
    how = {"scale": 80**-0.5}
    mine = kernel("tangent", "tangent_at")(*(x.to(place) for x in (centre, keys, directions)), **how)
    right = tangent_reference.tangent_at(centre.double(), keys.double(), directions.double(), **how)
    pairs = (
        (mine.full(shift.to(place)).cpu(), right.full(shift.double())),
        (mine.diagonal(shift.to(place)).cpu(), right.diagonal(shift.double())),
    )
    return _check(torch.stack([(a - b).norm(dim=-1) / b.norm(dim=-1) for a, b in pairs]), torch.float32)


def tangent_work(place: str) -> Work:
    """Full and diagonal tangents of one KV head's group for many shifts: keys and directions are read once, and the
    responses of the tokens, which both tangents need, are computed once."""
    group = LAYER.query_heads // LAYER.kv_heads
    centre, keys, directions, shift = (x.to(place) for x in _tangent_inputs(group, LONG, LAYER.dim, SHIFTS))
    how = {"scale": LAYER.dim**-0.5}
    mine = kernel("tangent", "tangent_at")(centre, keys, directions, **how)
    plain = tangent_reference.tangent_at(centre, keys, directions, **how)
    return Work(
        lambda: mine.both(shift),
        {"plain": lambda: (plain.full(shift), plain.diagonal(shift))},
        _bytes(keys, directions, shift) + 2 * _bytes(shift),
        6 * group * SHIFTS * LONG * LAYER.dim,
        torch.float32,
    )


def _bytes(*arrays: Tensor) -> int:
    return sum(array.numel() * array.element_size() for array in arrays)


def _check(relative: Tensor, dtype: torch.dtype) -> Check:
    """NaN is the worst of all."""
    return Check(float(relative.nan_to_num(nan=torch.inf).max()), ALLOWED[dtype])


CHECKS: dict[str, Callable[[str], Check]] = {
    "cell_errors": cell_errors_check,
    "attention_mass": attention_mass_check,
    "leverage": leverage_check,
    "tangent": tangent_check,
}
