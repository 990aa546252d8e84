"""Leverage in Triton without a card: numbers under the interpreter, machine code for three architectures."""

from __future__ import annotations

import pytest
from ahead_of_time import ARCHITECTURES, compile_for, expect_sound
from interpreted import interpreted

FILE = "interpreted_leverage"


def test_scores_are_those_of_the_reference() -> None:
    # query heads, sets of directions, tokens, width, storage, loose direction
    cases = [
        [4, 2, 333, 80, "float32", False],
        [3, 3, 111, 20, "float64", True],
        [2, 1, 300, 63, "bfloat16", False],
        [2, 2, 257, 64, "float16", True],
        [1, 1, 450, 111, "float32", True],
        [4, 2, 1040, 17, "float64", False],  # two runs of tokens
    ]
    for case, found in zip(cases, interpreted(FILE, "parity", cases), strict=True):
        assert found["log"] == {"triton": 1, "cpu": 0, "reasons": {}}, (case, found)
        assert found["worst"] < 3e-6, (case, found)
        assert found["rho"] < 1e-6, (case, found)


def test_one_wrong_number_would_show() -> None:
    assert all(moved > 1e-5 for moved in interpreted(FILE, "one_wrong_number"))


def test_what_float32_cannot_factor_is_the_reference_s_and_counted() -> None:
    found = interpreted(FILE, "handed_over")
    kept, *handed = found["worst"]
    assert 1e-9 < kept < 3e-6
    assert max(handed) < 1e-9
    assert found["jitter"][0] == found["jitter"][1]
    assert found["log"]["triton"] == 1
    assert sum(found["log"]["reasons"].values()) == 2
    assert all("head" in reason for reason in found["log"]["reasons"])


def test_a_matrix_without_factor_names_its_head() -> None:
    ours, theirs = interpreted(FILE, "no_factor")
    assert ours == theirs
    assert ours[0] == 2


def test_scales_beyond_float32_and_large_channels_are_no_reason_to_hand_over() -> None:
    for found in interpreted(FILE, "scales"):
        assert found["log"]["reasons"] == {}
        assert found["worst"] < 3e-6


def test_a_head_that_is_kept_is_right_to_within_a_near_tie() -> None:
    found = interpreted(FILE, "accepted")
    kept = [one for one in found if not one["handed"]]
    assert len(kept) >= 4
    assert len(found) - len(kept) >= 4
    assert all(one["worst"] <= 1e-5 for one in kept), kept
    assert all(one["worst"] < 1e-8 for one in found if one["handed"])


def test_empty_pools_and_wide_directions() -> None:
    none, equal, log = interpreted(FILE, "shapes")
    assert none == [2, 0]
    assert equal
    assert log["cpu"] == 1
    assert "257" in next(iter(log["reasons"]))


GRAM = {"weights": "*fp32", "partial": "*fp32", "tokens": "i32", "run": "i32", "shared": "i32"}
FACTOR = dict.fromkeys(("matrix", "factor", "inverse", "diagonal"), "*fp32")
LENGTHS = dict.fromkeys(("inverse", "doubt", "lengths", "doubtful"), "*fp32") | {"tokens": "i32", "shared": "i32"}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_machine_code_of_the_matrix_products(arch: int) -> None:
    from kvtool.kernels.leverage import triton as kernels

    wide = {"D": 192, "P": 192, "B": kernels.TILE}
    narrow = {"D": 80, "P": 80, "B": kernels.TILE}
    for storage, shape in (("*fp32", wide), ("*bf16", narrow)):
        gram = compile_for(kernels.gram_kernel, {"directions": storage, **GRAM}, {**shape, "T": kernels.TOKENS}, arch)
        expect_sound(gram, matrix=True)
    storage, shape = ("*fp32", wide) if arch == 80 else ("*bf16", narrow)
    lengths = compile_for(
        kernels.lengths_kernel, {"directions": storage, **LENGTHS}, {**shape, "T": kernels.TILE}, arch
    )
    expect_sound(lengths, matrix=True)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_machine_code_of_the_factor(arch: int) -> None:
    from kvtool.kernels.leverage import triton as kernels

    shape = {"P": 256, "R": 256, "C": kernels.PANEL}
    expect_sound(compile_for(kernels.factor_kernel, FACTOR, shape, arch, **kernels.FACTOR_HOW), matrix=False)
    partial = {"partial": "*fp32", "ridge": "*fp64", "loose": "*fp64", "matrix": "*fp32", "runs": "i32"}
    shape = {"D": 192, "P": 192, "B": 256, "LOOSE": True}
    expect_sound(compile_for(kernels.matrix_kernel, partial, shape, arch), matrix=False)


def test_sizes_of_one_compile_too() -> None:
    """Triton makes constants of whole numbers that are 1: one token, one run, directions of every head's own."""
    from kvtool.kernels.leverage import triton as kernels

    pointers = {name: kind for name, kind in GRAM.items() if kind != "i32"}
    shape = {"D": 16, "P": 16, "B": kernels.TILE, "T": kernels.TOKENS, "tokens": 1, "shared": 1}
    gram = compile_for(kernels.gram_kernel, {"directions": "*fp32", **pointers, "run": "i32"}, shape, 90)
    expect_sound(gram, matrix=True)
    partial = {"partial": "*fp32", "ridge": "*fp64", "matrix": "*fp32"}
    shape = {"D": 16, "P": 16, "B": 16, "LOOSE": False, "loose": None, "runs": 1}
    expect_sound(compile_for(kernels.matrix_kernel, partial, shape, 90), matrix=False)
    pointers = {name: kind for name, kind in LENGTHS.items() if kind != "i32"}
    shape = {"D": 16, "P": 16, "B": kernels.TILE, "T": kernels.TILE, "tokens": 1, "shared": 1}
    expect_sound(compile_for(kernels.lengths_kernel, {"directions": "*fp32", **pointers}, shape, 90), matrix=True)
