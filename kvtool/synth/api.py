"""`kvtool.synth`: write a trace whose structure and right answer are known."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path

import torch

from kvtool.errors import KvtoolError
from kvtool.synth.canvas import Heads
from kvtool.synth.scene import Size
from kvtool.synth.table import construction
from kvtool.synth.write import write
from kvtool.trace import Trace, open_trace
from kvtool.trace.layout import FLOATS

LEAST_PROMPT, LEAST_STEPS, LEAST_DIM, MOST = 64, 8, 24, 1 << 17
DEPTH = 0.5


def synth(
    name: str,
    output: str | Path,
    *,
    prompt: int = 512,
    steps: int = 128,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 32,
    seed: int = 0,
    dtype: str = "float32",
    depths: Iterable[float] | None = None,
    lengths: Iterable[int] | None = None,
    force: bool = False,
) -> Trace:
    """Write a synthetic trace; the same arguments give the same bytes.

    Args:
        name: a construction, see docs/synth.md.
        prompt, steps: rows of the prompt and behind it.
        layers, heads, kv_heads, dim: layers, query heads, KV heads, channels of queries, keys and values.
        dtype: stored dtype, float32, float16 or bfloat16.
        depths: of the needle, 0 to 1; a sequence for each.
        lengths: prompts of the needle, instead of `prompt`; a sequence for each pair.
        force: replace a trace that is there.

    Raises:
        KvtoolError: `usage`, `dtype`, `output-exists` and whatever else writing a trace can raise.
    """
    build = construction(name)
    if dtype not in FLOATS:
        raise KvtoolError("dtype", f"--dtype {dtype} cannot be stored in a trace", "use " + ", ".join(FLOATS))
    if name != "needle" and (depths is not None or lengths is not None):
        raise KvtoolError(
            "usage", f"--depths and --lengths belong to needle, not to {name}", "use --prompt and --steps"
        )
    chosen = [DEPTH] if depths is None else list(depths)
    prompts = [prompt] if lengths is None else list(lengths)
    _check(chosen, prompts, steps, layers, heads, kv_heads, dim)
    sizes = [Size(length, steps, depth) for depth, length in itertools.product(chosen, prompts)]
    with torch.no_grad():
        write(
            Path(output),
            name,
            [(size, build(size)) for size in sizes],
            Heads(heads, kv_heads, dim),
            layers=layers,
            seed=seed,
            dtype=FLOATS[dtype],
            force=force,
        )
    return open_trace(output)


def _check(
    depths: list[float], prompts: list[int], steps: int, layers: int, heads: int, kv_heads: int, dim: int
) -> None:
    """Sizes at which every construction is what it says."""
    if not depths or not prompts:
        raise KvtoolError("usage", "--depths and --lengths need at least one number each")
    for what, values in (("--depths", depths), ("--lengths", prompts)):
        if len(set(values)) != len(values):
            raise KvtoolError("usage", f"{what} names the same value twice")
    for depth in depths:
        if not 0 <= depth <= 1:
            raise KvtoolError("usage", f"a depth of {depth:g} lies outside 0 to 1")
    for what, value, least in (
        *(("a prompt", length, LEAST_PROMPT) for length in prompts),
        ("--steps", steps, LEAST_STEPS),
        ("--layers", layers, 1),
        ("--kv-heads", kv_heads, 1),
        ("--heads", heads, 1),
    ):
        if not least <= value <= MOST:
            raise KvtoolError("usage", f"{what} of {value} is out of range", f"it may be {least} to {MOST}")
    if heads % kv_heads:
        raise KvtoolError("usage", f"{heads} query heads cannot share {kv_heads} KV heads evenly")
    if dim % 4 or not LEAST_DIM <= dim <= 1024:
        raise KvtoolError("usage", f"--dim {dim} is out of range", f"use a multiple of 4 from {LEAST_DIM} to 1024")
