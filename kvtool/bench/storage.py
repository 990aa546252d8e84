"""Storage row: one head of a trace, checked on the way, against a memory map that trusts its file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from kvtool.bench.goals import Measured
from kvtool.bench.situation import Situation
from kvtool.errors import KvtoolError
from kvtool.layer import Geometry
from kvtool.trace import TraceWriter, open_trace
from kvtool.trace.layout import layer_path
from kvtool.trace.reader import Sequence

TOKENS, DIM, KV_HEADS = 16384, 128, 2


def write_heads(path: Path, tokens: int, dim: int, kv_heads: int) -> Sequence:
    """A trace of one layer in float16, one query in it."""
    make = torch.Generator().manual_seed(0)
    geometry = Geometry(0, kv_heads, kv_heads, dim, dim, dim**-0.5)
    with TraceWriter(
        path, model={"name": "made up"}, tokenizer=None, capture={"run_dtype": "float16"}, dtype=torch.float16
    ) as writer:
        sequence = writer.sequence({0: geometry}, prompt_length=tokens - 1)
        keys, values = (torch.randn(kv_heads, tokens, dim, generator=make) for _ in range(2))
        queries = torch.randn(kv_heads, 1, dim, generator=make)
        rows = torch.arange(tokens)
        sequence.append(0, keys=keys.half(), values=values.half(), queries=queries.half(), query_steps=rows[-1:])
        sequence.finish(tokens=torch.zeros(tokens, dtype=torch.int32), positions=rows)
    return open_trace(path).sequences[0]


def mapped_copy(file: Path, tokens: int, dim: int) -> np.ndarray:
    """The payload of a chunk file by numpy's memory map, copied into memory, its checksum left unread."""
    return np.array(np.memmap(file, dtype=np.float16, mode="r", shape=(tokens, dim)))


def head_read(here: Situation) -> dict[str, Measured]:
    """CPU seconds, page faults of the system included; the file is in the page cache."""
    path = here.scratch / "heads.zarr"
    sequence = write_heads(path, TOKENS, DIM, KV_HEADS)
    file = path / layer_path(0, 0) / "keys" / "c" / "0" / "0" / "0"
    same = np.array_equal(sequence.head("keys", 0, 0).numpy(), mapped_copy(file, TOKENS, DIM))
    if not same:
        raise KvtoolError("internal", "a head read from a trace differs from its file")
    rounds = here.watch.paired(
        {
            "kvtool": lambda: sequence.head("keys", 0, 0),
            "memory map": lambda: mapped_copy(file, TOKENS, DIM),
        },
        3.0,
    )
    return {"head_read": rounds.ratio("kvtool", "memory map", tokens=TOKENS, dim=DIM, bytes=TOKENS * DIM * 2)}
