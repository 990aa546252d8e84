"""Tangents in Triton without a card: numbers under the interpreter, machine code for three architectures."""

from __future__ import annotations

import pytest
from ahead_of_time import ARCHITECTURES, compile_for, expect_sound
from interpreted import interpreted

FILE = "interpreted_tangent"


def test_tangents_are_those_of_the_reference() -> None:
    # query heads, tokens, shifts, D, Dv, storage, softcap, sink logits
    cases = [
        [3, 111, 5, 80, 80, "float32", None, True],
        [2, 63, 70, 192, 128, "float32", 5.0, False],
        [2, 33, 65, 40, 64, "float64", 3.0, True],
        [1, 50, 3, 64, 63, "bfloat16", None, False],
        [2, 32, 17, 63, 20, "float16", 8.0, True],
        [1, 1111, 2, 16, 16, "float64", None, False],  # two runs of tokens
    ]
    for case, found in zip(cases, interpreted(FILE, "parity", cases), strict=True):
        wide = case[5] == "float64"
        assert found["log"] == {"triton": 1, "cpu": 0, "reasons": {}}
        assert found["same arrays"]
        assert found["dtype"] == ("torch.float64" if wide else "torch.float32")
        assert max(found["errors"].values()) < (1e-12 if wide else 2e-5), (case, found)


def test_one_wrong_number_would_show() -> None:
    moved = interpreted(FILE, "one_wrong_number")  # in float64, where parity holds to 1e-12
    assert min(moved) > 1e-6


def test_edges() -> None:
    found = interpreted(FILE, "edges")
    assert max(found["none"]) == 0
    assert max(found["one"]) < 1e-6
    assert found["no shift"] == [2, 0, 24]
    assert max(found["sharp"]) < 1e-10
    assert found["wide"]["cpu"] == 1
    assert "300" in next(iter(found["wide"]["reasons"]))


PLAIN = ("shift", "weights", "alone", "slopes", "mean_key", "full", "diagonal")


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("storage", ["fp32", "bf16", "fp64"])
def test_machine_code_of_the_products(arch: int, storage: str) -> None:
    from kvtool.kernels.tangent import triton as kernels

    wide = storage == "fp64"
    kinds = dict.fromkeys(PLAIN, "*fp64" if wide else "*fp32") | dict.fromkeys(("keys", "directions"), f"*{storage}")
    block = kernels.WIDE_BLOCK if wide else kernels.BLOCK
    shape = {"D": 80, "DV": 80} if storage == "bf16" else {"D": 192, "DV": 128}
    built = compile_for(kernels.tangents_kernel, {**kinds, "shifts": "i32", "tokens": "i32"}, {**shape, **block}, arch)
    expect_sound(built, matrix=not wide)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_machine_code_at_the_centre(arch: int) -> None:
    import triton.language as tl

    from kvtool.kernels.tangent import triton as kernels

    shape = {"D": 192, "P": 256, "T": kernels.TOKENS, "ACC": tl.float32}
    logits = {"centre": "*fp32", "keys": "*bf16", "logits": "*fp32", "tokens": "i32"}
    expect_sound(compile_for(kernels.logits_kernel, logits, shape, arch), matrix=False)
    means = {"numbers": "*bf16", "weights": "*fp32", "partial": "*fp32", "tokens": "i32", "run": "i32"}
    expect_sound(compile_for(kernels.means_kernel, means, shape, arch), matrix=False)


def test_sizes_of_one_compile_too() -> None:
    """Triton makes constants of whole numbers that are 1: one token, one shift."""
    from kvtool.kernels.tangent import triton as kernels

    kinds = dict.fromkeys((*PLAIN, "keys", "directions"), "*fp32")
    shape = {"D": 16, "DV": 16, **kernels.BLOCK, "shifts": 1, "tokens": 1}
    expect_sound(compile_for(kernels.tangents_kernel, kinds, shape, 90), matrix=True)
