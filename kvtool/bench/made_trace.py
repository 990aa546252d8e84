"""Made trace: what a capture of a small model leaves on disk, without the model."""

from __future__ import annotations

from pathlib import Path

import torch

from kvtool.bench.synthetic import SMOLLM2, Heads, arrays
from kvtool.layer import Geometry, Gradients
from kvtool.rotation import Rotation
from kvtool.trace import TraceWriter

PROMPT, STEPS, LAYERS, DRAWS = 2048, 512, 30, 4
VOCABULARY = 49152
BASE = 1e5  # of the rotary frequencies
BLOCK = 128  # steps whose targets a gradient reaches
DTYPE = torch.bfloat16


def write_trace(
    path: Path,
    *,
    heads: Heads = SMOLLM2,
    prompt: int = PROMPT,
    steps: int = STEPS,
    layers: int = LAYERS,
    draws: int = DRAWS,
    seed: int = 0,
) -> Path:
    """One sequence of SmolLM2's shape, with output projections and gradients, stored in bfloat16.

    Its arrays are `synthetic.arrays`: attention over them looks like a model's, and means nothing.
    """
    tokens, dim = prompt + steps, heads.dim
    rotation = Rotation(dim, inv_freq=BASE ** -(torch.arange(0, dim, 2) / dim))
    geometries = {
        layer: Geometry(layer, heads.query_heads, heads.kv_heads, dim, dim, dim**-0.5, rotation=rotation)
        for layer in range(layers)
    }
    rows = torch.arange(tokens)
    make = torch.Generator().manual_seed(seed)
    known = Gradients(draws, min(BLOCK, steps), "continuation", (prompt, tokens), steps, seed)
    with TraceWriter(
        path,
        model={"name": f"made up, {heads.name}"},
        tokenizer=None,
        capture={"source": "bench", "seed": seed, "run_dtype": "bfloat16"},
        dtype=DTYPE,
        planned=1,
    ) as writer:
        for layer in geometries:
            size = (heads.query_heads, dim, heads.query_heads * dim)
            writer.output_projection(layer, (torch.randn(size, generator=make) / size[2] ** 0.5).to(DTYPE))
        sequence = writer.sequence(geometries, prompt_length=prompt, attributes={"id": "bench"})
        gradients = {}
        for layer in geometries:
            queries, keys, values = (x.to(DTYPE) for x in arrays(heads, tokens, tokens, seed + layer))
            sequence.append(layer, queries=queries, query_steps=rows, keys=keys, values=values)
            drawn = torch.randn(draws, heads.query_heads, steps, dim, generator=make)
            gradients[layer] = (drawn / steps).to(DTYPE)
        sequence.finish(
            tokens=torch.randint(0, VOCABULARY, (tokens,), generator=make),
            positions=rows,
            gradients=known,
            gradient_steps=rows[prompt:],
            output_gradients=gradients,
        )
    return path
