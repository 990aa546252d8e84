"""Compile a Triton kernel for a card that is not here, and read what the machine code says of itself.

`compile_for` needs no GPU: Triton lowers to a cubin with its bundled ptxas, and its bundled disassemblers read it.

    built = compile_for(kernel, {"x": "*bf16", "n": "i32"}, {"BLOCK": 64}, arch=90, num_warps=4)
    expect_sound(built, matrix="HGMMA")
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHARED_LIMIT_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # of one program, CUDA programming guide
ARCHITECTURES = (80, 90, 100)
MATRIX = ("UTCHMMA", "HGMMA", "HMMA")  # the tensor cores of sm_100, sm_90, sm_80
REGISTER_FILE = 64 * 1024


@dataclass(frozen=True)
class Built:
    """One kernel for one architecture.

    Attributes:
        registers: of a thread.
        stack_bytes: of a thread; more than 0 means that registers were spilled.
        shared_bytes: of a program, the dynamic part included.
        local: loads and stores of thread-local memory (LDL, STL), also spills.
        counts: occurrences of the mnemonics UTCHMMA, HGMMA, HMMA and FFMA.
    """

    name: str
    arch: int
    warps: int
    registers: int
    stack_bytes: int
    shared_bytes: int
    local: int
    counts: dict[str, int]

    @property
    def matrix(self) -> str:
        """The tensor core instruction in use, or "" where there is none."""
        return next((name for name in MATRIX if self.counts[name]), "")

    def __str__(self) -> str:
        return (
            f"{self.name} sm_{self.arch} {self.warps} warps: {self.registers} registers, {self.stack_bytes} B stack, "
            f"{self.local} LDL/STL, {self.shared_bytes} B shared, {self.matrix or 'no tensor cores'}, "
            f"{self.counts['FFMA']} FFMA"
        )


def compile_for(
    kernel: Any,
    signature: Mapping[str, str],
    constexprs: Mapping[str, Any],
    arch: int,
    num_warps: int = 4,
    num_stages: int = 2,
    aligned: tuple[str, ...] | None = None,
) -> Built:
    """Build `kernel` (a @triton.jit function) for sm_`arch`.

    Args:
        signature: type of every argument that is no constexpr, e.g. "*fp32", "i32", "fp32".
        constexprs: value of every constexpr; with None, the argument is an absent pointer.
        aligned: arguments known to be multiples of 16; None: all pointers, as from torch's allocator.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = list(kernel.arg_names)
    assert set(names) == set(signature) | set(constexprs), set(names) ^ (set(signature) | set(constexprs))
    if aligned is None:
        aligned = tuple(name for name, kind in signature.items() if kind.startswith("*"))
    source = ASTSource(
        fn=kernel,
        signature={name: "constexpr" if name in constexprs else signature[name] for name in names},
        constexprs={(names.index(name),): value for name, value in constexprs.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}
    built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    usage, text = _read(built.asm["cubin"])
    return Built(
        name=kernel.__name__,
        arch=arch,
        warps=num_warps,
        registers=usage["REG"],
        stack_bytes=usage["STACK"],
        shared_bytes=built.metadata.shared,
        local=len(re.findall(r"\b(?:LDL|STL)(?:\.|\b)", text)),
        counts={name: len(re.findall(rf"\b{name}\b", text)) for name in (*MATRIX, "FFMA")},
    )


def expect_sound(built: Built, matrix: bool | str) -> None:
    """No spills, within shared memory and the register file, and tensor cores where they are meant.

    Args:
        matrix: True for the tensor cores of that architecture, False for none, or a mnemonic.
    """
    assert built.stack_bytes == 0, f"spills: {built}"
    assert built.local == 0, f"spills: {built}"
    assert built.registers <= 255, f"{built}"
    assert built.registers * 32 * built.warps <= REGISTER_FILE, f"does not fit the register file: {built}"
    assert built.shared_bytes <= SHARED_LIMIT_BYTES[built.arch], f"too much shared memory: {built}"
    if isinstance(matrix, str):
        assert built.counts[matrix] > 0, f"no {matrix}: {built}"
    else:
        assert bool(built.matrix) == matrix, f"tensor cores {'missing' if matrix else 'unasked for'}: {built}"


def _read(cubin: bytes) -> tuple[dict[str, int], str]:
    """Resource usage as cuobjdump says it, and the disassembly."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        usage = _said(_tool("cuobjdump"), "-res-usage", str(path))
        text = _said(_tool("nvdisasm"), "-c", str(path))
    line = next(line for line in usage.splitlines() if "REG:" in line)
    return {name: int(number) for name, number in re.findall(r"(\w+)(?:\[\d+\])?:(\d+)", line)}, text


def _said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, env=dict(os.environ)).stdout


@functools.cache
def _tool(name: str) -> str:
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    assert path.is_file(), f"Triton brings no {name}"
    return str(path)
