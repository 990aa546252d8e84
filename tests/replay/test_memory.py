"""Sums over all queries never build the whole attention matrix."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BUILD = """
import resource, sys, torch
torch.set_num_threads(1)
from kvtool.layer import Geometry
from kvtool.trace import TraceWriter
from kvtool.replay import replay

tokens, prompt = 16384 + 32, 16384
make = torch.Generator().manual_seed(0)
path = sys.argv[1]
with TraceWriter(path, model={"name": "long"}, tokenizer=None, capture={}, dtype=torch.float16) as writer:
    sequence = writer.sequence(
        {0: Geometry(0, 8, 2, 32, 32, 32**-0.5, rotation="none")}, prompt_length=prompt, attributes={}
    )
    rows = torch.arange(tokens)
    queries, keys, values = (torch.randn(n, tokens, 32, generator=make) for n in (8, 2, 2))
    sequence.append(0, queries=queries, query_steps=rows, keys=keys, values=values)
    sequence.finish(tokens=rows, positions=rows)
result = replay(path, ["h2o", "oracle-mass", "oracle-caote"], ratios=["0.5", "0.9"])
print(len(result.entries("rows")), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def test_a_16k_token_layer_with_8_heads_replays_under_2_gib(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(tmp_path / "long.zarr")], capture_output=True, text=True, check=True
    )
    rows, peak = (int(word) for word in done.stdout.split())
    assert rows == 5 * 2 * 8
    assert peak < 2 << 30  # one head's matrix alone would be 1 GiB, all of them 8.6 GB
