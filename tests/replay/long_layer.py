"""One long layer, written and replayed, and the most memory that took: the bound that docs/scaling.md states.

    python tests/replay/long_layer.py write long.zarr [PROMPT EVALUATED QUERY_HEADS KV_HEADS DIM LAYERS]
    python tests/replay/long_layer.py replay long.zarr [POLICY …]

The first writes random arrays as bfloat16, all queries of the prompt included, 256 rows at a time; the second prints
the high-water mark of the resident set of a process that replays them with `RATIOS`, and its CPU seconds.
"""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path

import torch

from kvtool.layer import Geometry
from kvtool.rotation import Rotation
from kvtool.trace import TraceWriter

RATIOS = ["0.5", "0.7", "0.8", "0.9", "0.95"]
# Ten with the two controls that always run: full and random.
POLICIES = ["streaming-llm", "knorm", "keydiff", "tova", "snapkv", "lagkv", "expected-attention", "capkv"]
SIZES = (32768, 512, 32, 8, 128, 1)


def write(path: str, prompt: int, evaluated: int, heads: int, kv_heads: int, dim: int, layers: int) -> None:
    """A trace of random arrays with the geometry of a Llama 3 layer, unless told otherwise."""
    tokens, make = prompt + evaluated, torch.Generator().manual_seed(0)
    inv_freq = 500000.0 ** (-torch.arange(0, dim, 2) / dim)
    geometries = {
        layer: Geometry(layer, heads, kv_heads, dim, dim, dim**-0.5, rotation=Rotation(dim, "half", inv_freq))
        for layer in range(layers)
    }
    rows = torch.arange(tokens)
    model = {"name": "random numbers"}
    with TraceWriter(path, model=model, tokenizer=None, capture={}, dtype=torch.bfloat16) as writer:
        sequence = writer.sequence(geometries, prompt_length=prompt, attributes={})
        for begin in range(0, tokens, 4096):
            some = rows[begin : begin + 4096]
            for layer in range(layers):
                queries, keys, values = (
                    torch.randn(n, len(some), dim, generator=make).to(torch.bfloat16)
                    for n in (heads, kv_heads, kv_heads)
                )
                sequence.append(layer, queries=queries, query_steps=some, keys=keys, values=values)
        sequence.finish(tokens=rows, positions=rows)


def peak_bytes() -> int:
    """The most memory that this process has had resident."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def measure(path: str, policies: list[str]) -> None:
    """Replay and print."""
    from kvtool.replay import replay

    torch.set_num_threads(1)
    before = peak_bytes()

    def tell(done: int, total: int, what: str) -> None:
        print(f"{what}: peak {peak_bytes() / 1e9:.3f} GB", flush=True)

    begun = time.perf_counter()
    replay(path, policies or POLICIES, ratios=RATIOS, progress=tell)
    spent = sum(os.times()[:2])
    print(f"before {before} peak {peak_bytes()} cpu_s {spent:.1f} wall_s {time.perf_counter() - begun:.1f}")


if __name__ == "__main__":
    what, path, *words = sys.argv[1:]
    if what == "write":
        write(path, *(int(word) for word in words[: len(SIZES)]), *SIZES[len(words) :])
    else:
        measure(path, words)
