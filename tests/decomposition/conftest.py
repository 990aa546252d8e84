"""Traces small enough for loops over tokens, with everything that attention can be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvtool.decomposition import kv_head
from kvtool.layer import Geometry, Gradients
from kvtool.rotation import Rotation
from kvtool.trace import TraceWriter

HEADS, KV_HEADS, KEY_DIM, VALUE_DIM, PROMPT, LENGTH, DRAWS = 4, 2, 8, 6, 34, 53, 3
torch.set_num_threads(1)


@pytest.fixture
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough for what does not speak of Monte Carlo, and 30 times quicker."""
    monkeypatch.setattr(kv_head, "DRAWS", 300)


def geometries() -> dict[int, Geometry]:
    """A softcapped layer, a sliding one with sink logits and no rotation, and one that reads the first's cache."""
    sizes = (HEADS, KV_HEADS, KEY_DIM, VALUE_DIM, 0.5)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.25])
    turned = Rotation(rotary_dims=8, inv_freq=torch.tensor([1.0, 0.3, 0.1, 0.01]))
    return {
        0: Geometry(0, *sizes, softcap=4.0, rotation=turned),
        1: Geometry(1, *sizes, kind="sliding", window=27, sink_logits=sinks, rotation="none"),
        2: Geometry(2, *sizes, softcap=4.0, rotation=turned, kv_source=0),
    }


@pytest.fixture(scope="session")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes a trace once per choice of dtype, gradients and captured queries."""
    folder = tmp_path_factory.mktemp("traces")

    def make(dtype: torch.dtype = torch.float32, *, gradients: bool = True, first_query: int = 0) -> Path:
        path = folder / f"{dtype}-{gradients}-{first_query}.zarr"
        if not path.exists():
            _write(path, dtype, gradients, first_query)
        return path

    return make


def _write(path: Path, dtype: torch.dtype, gradients: bool, first_query: int) -> None:
    with TraceWriter(
        path, model={"name": "toy", "layers": 3}, tokenizer=None, capture={"run_dtype": "float32"}, dtype=dtype
    ) as writer:
        for index in range(2):
            g = torch.Generator().manual_seed(index)
            sequence = writer.sequence(geometries(), prompt_length=PROMPT)
            for number, geometry in geometries().items():
                if geometry.kv_source is None:
                    keys = torch.randn(KV_HEADS, LENGTH, KEY_DIM, generator=g)
                    values = torch.randn(KV_HEADS, LENGTH, VALUE_DIM, generator=g)
                    sequence.append(number, keys=keys.to(dtype), values=values.to(dtype))
                queries = torch.randn(HEADS, LENGTH - first_query, KEY_DIM, generator=g) + 0.5
                sequence.append(number, queries=queries.to(dtype), query_steps=torch.arange(first_query, LENGTH))
            told = {}
            if gradients:
                steps = LENGTH - PROMPT
                shape = (DRAWS, HEADS, steps, VALUE_DIM)
                told = {
                    "gradients": Gradients(DRAWS, steps, "continuation", (PROMPT, LENGTH - 1), steps - 1, 0),
                    "gradient_steps": torch.arange(PROMPT, LENGTH),
                    "output_gradients": {n: torch.randn(shape, generator=g).to(dtype) for n in geometries()},
                }
            sequence.finish(tokens=torch.arange(LENGTH) + 100 * index, positions=torch.arange(LENGTH), **told)
