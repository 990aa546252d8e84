"""Traces with every kind of layer, written from random numbers."""

from __future__ import annotations

from pathlib import Path

import torch

from kvtool.layer import Geometry
from kvtool.trace import TraceWriter

HEADS, KV_HEADS, KEY_DIM, VALUE_DIM, WIDTH = 4, 2, 4, 3, 5


def geometries() -> dict[int, Geometry]:
    """Two layers with caches of their own, one in chunks, and one that reads the first one's cache in a window."""
    shape = (HEADS, KV_HEADS, KEY_DIM, VALUE_DIM)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.25])
    return {
        2: Geometry(2, *shape, 0.6, softcap=3.0, rotation="none"),
        3: Geometry(3, *shape, 0.5, kind="sliding", window=9, sink_logits=sinks, rotation="none"),
        5: Geometry(5, *shape, 0.4, kind="chunked", window=7, rotation="none"),
        8: Geometry(8, *shape, 0.7, kind="sliding", window=6, sink_logits=sinks, rotation="none", kv_source=2),
    }


def write(
    path: Path,
    lengths: tuple[int, ...] = (26, 19),
    *,
    prompts: tuple[int, ...] | None = None,
    first_query: int | None = 0,
    layers: tuple[int, ...] = (2, 3, 5, 8),
    order: tuple[int, ...] | None = None,
) -> Path:
    """Sequence n of the seeds in `order` (0, 1, … unless given) has the same numbers wherever it stands.

    Args:
        prompts: prompt lengths; all but the last 8 rows unless given.
        first_query: queries of this and later steps are stored; None is those behind the prompt.
    """
    made = {index: geometry for index, geometry in geometries().items() if index in layers}
    with TraceWriter(
        path, model={"name": "toy"}, tokenizer=None, capture={"run_dtype": "float32"}, dtype=torch.float32
    ) as writer:
        for index in made:
            stream = torch.Generator().manual_seed(100 + index)
            writer.output_projection(index, torch.randn(HEADS, VALUE_DIM, WIDTH, generator=stream))
        for place, count in enumerate(lengths):
            seed = place if order is None else order[place]
            prompt = max(1, count - 8) if prompts is None else prompts[place]
            since = prompt if first_query is None else first_query
            sequence = writer.sequence(made, prompt_length=prompt, attributes={"id": f"s{seed}", "seed": seed})
            for index, geometry in made.items():
                stream = torch.Generator().manual_seed(1000 * seed + index)
                queries = torch.randn(HEADS, count, KEY_DIM, generator=stream)[:, since:]
                if geometry.kv_source is None:
                    sequence.append(
                        index,
                        keys=torch.randn(KV_HEADS, count, KEY_DIM, generator=stream),
                        values=torch.randn(KV_HEADS, count, VALUE_DIM, generator=stream),
                    )
                sequence.append(index, queries=queries, query_steps=torch.arange(since, count))
            sequence.finish(
                tokens=torch.arange(count) + 100 * seed,
                positions=torch.arange(count),
                text=[f"w{row} ".encode() for row in range(count)],
            )
    return path
