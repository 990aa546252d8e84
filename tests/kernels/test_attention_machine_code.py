"""The machine code of the attention kernels, for cards that are not here: no register is spilled, shared memory
suffices, and tensor cores do the products. The tiles are those that a launch on such a card would choose."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ahead_of_time import Built, compile_for, expect_sound

POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
INDICES = dict.fromkeys(("steps", "first_visible", "rows", "low", "high"), "*i32")
NUMBERS = {"count": "i32", "tokens": "i32", "scale": "fp32", "softcap": "fp32"}


def given(
    names: dict[str, str], options: dict[str, Any], absent: tuple[str, ...]
) -> tuple[dict[str, str], dict[str, Any]]:
    """Signature and constexprs; an absent pointer is None."""
    kept = {name: kind for name, kind in names.items() if name not in absent}
    return kept, {**options, **dict.fromkeys(absent)}


def retained(dtype: torch.dtype, dim: int, value_dim: int, arch: int, everything: bool) -> Built:
    """`everything`: softcap, sink logits and vectors; else none of them."""
    from kvtool.kernels.retained_attention.retained_kernel import retained_kernel
    from kvtool.kernels.retained_attention.triton import options_of, tiling_of

    options = options_of(tiling_of(dtype, dim, value_dim, arch // 10), dtype, dim, value_dim, 4)
    how = {name: options.pop(name) for name in ("num_warps", "num_stages")}
    options |= dict.fromkeys(("SOFTCAP", "SINKS", "VECTORS"), everything)
    names = dict.fromkeys(("queries", "keys", "values"), POINTERS[dtype]) | {"evict_steps": "*i32", **INDICES}
    names |= dict.fromkeys(("sinks", "odds", "sums", "errors", "outputs"), "*fp32") | {"cells": "i32", **NUMBERS}
    signature, constexprs = given(names, options, () if everything else ("sinks", "errors", "outputs"))
    return compile_for(retained_kernel, signature, constexprs, arch, **how)


def mass(dtype: torch.dtype, dim: int, arch: int, everything: bool) -> list[Built]:
    """Both passes. `everything`: softcap, sink logits and evicted tokens; else none of them."""
    from kvtool.kernels.attention_mass import triton as kernels

    _, options = kernels.options_of(dtype, dim, 4)
    how = {name: options.pop(name) for name in ("num_warps", "num_stages")}
    options |= {"SOFTCAP": everything, "EVICTED": everything}
    names = dict.fromkeys(("queries", "keys"), POINTERS[dtype]) | {"evict_steps": "*i32", **INDICES}
    names |= dict.fromkeys(("tops", "denominators"), "*fp32") | NUMBERS
    absent = () if everything else ("evict_steps",)
    first = given(
        {**names, "sinks": "*fp32"}, {**options, "SINKS": everything}, absent if everything else (*absent, "sinks")
    )
    second = given({**names, "mass": "*fp64"}, options, absent)
    return [
        compile_for(kernels.softmax_kernel, *first, arch, **how),
        compile_for(kernels.column_kernel, *second, arch, **how),
    ]


@pytest.mark.parametrize(
    ("dtype", "dim", "value_dim", "arch", "everything", "matrix"),
    [
        (torch.bfloat16, 64, 64, 90, False, "HGMMA"),
        (torch.float16, 128, 128, 90, True, "HMMA"),
        (torch.bfloat16, 128, 128, 80, True, "HMMA"),
        (torch.bfloat16, 128, 128, 100, False, "UTCHMMA"),
        (torch.bfloat16, 192, 128, 90, True, "HMMA"),
        (torch.bfloat16, 256, 256, 80, False, "HMMA"),
        (torch.float32, 80, 80, 100, False, "HMMA"),
        (torch.float32, 128, 128, 80, True, "HMMA"),
    ],
)
def test_retained_attention(
    dtype: torch.dtype, dim: int, value_dim: int, arch: int, everything: bool, matrix: str
) -> None:
    built = retained(dtype, dim, value_dim, arch, everything)
    expect_sound(built, matrix)
    assert built.arch == arch


@pytest.mark.parametrize(
    ("dtype", "dim", "arch", "everything"),
    [(torch.bfloat16, 128, 80, True), (torch.float16, 80, 90, False), (torch.float32, 256, 100, True)],
)
def test_attention_mass(dtype: torch.dtype, dim: int, arch: int, everything: bool) -> None:
    both = mass(dtype, dim, arch, everything)
    for built in both:
        expect_sound(built, matrix=True)
    assert len(both) == 2
