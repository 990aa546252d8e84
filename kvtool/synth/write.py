"""Write: scenes as the sequences of one trace."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from kvtool.layer import Geometry
from kvtool.synth.canvas import Heads, paint, stream
from kvtool.synth.scene import Scene, Size
from kvtool.trace import TraceWriter
from kvtool.trace.layout import dtype_name

SAMPLED = 16  # last steps whose attention output is stored, for verification
WIDTH = 64  # M, channels that output projections lead to
WORDS = 1000  # background token ids are below; landmarks have ids of their own above


def write(
    path: Path,
    name: str,
    scenes: list[tuple[Size, Scene]],
    heads: Heads,
    *,
    layers: int,
    seed: int,
    dtype: torch.dtype,
    force: bool,
) -> None:
    """One sequence a scene; what is stored of a layer is rounded to `dtype` once, and its outputs follow from that."""
    sizes = (heads.query_heads, heads.kv_heads, heads.dim, heads.dim, heads.scale)
    geometries = {layer: Geometry(layer, *sizes, rotation=heads.rotation) for layer in range(layers)}
    capture = {"source": "synth", "name": name, "seed": seed, "run_dtype": dtype_name(dtype)}
    with TraceWriter(
        path,
        model={"name": f"synthetic {name}"},
        tokenizer=None,
        capture=capture,
        dtype=dtype,
        force=force,
        planned=len(scenes),
    ) as writer:
        for layer in geometries:
            make = stream("projection", seed, layer)
            projection = torch.randn(heads.query_heads, heads.dim, WIDTH, generator=make)
            writer.output_projection(layer, (projection / (heads.query_heads * heads.dim) ** 0.5).to(dtype))
        for size, scene in scenes:
            _sequence(writer, name, size, scene, heads, geometries, seed, dtype)


def _sequence(
    writer: TraceWriter,
    name: str,
    size: Size,
    scene: Scene,
    heads: Heads,
    geometries: dict[int, Geometry],
    seed: int,
    dtype: torch.dtype,
) -> None:
    synthetic = {"name": name, "seed": seed, "answer": scene.answer}
    key: tuple[object, ...] = (name, seed, size.prompt, size.steps)
    identity = name
    if name == "needle":
        synthetic["depth"] = size.depth
        key, identity = (*key, size.depth), f"needle at {size.depth:g} of {size.prompt}"
    attributes = {"id": identity, "landmarks": dict(scene.landmarks), "synthetic": synthetic}
    sequence = writer.sequence(geometries, prompt_length=size.prompt, attributes=attributes)
    rows, samples = torch.arange(size.tokens), {}
    for layer, geometry in geometries.items():
        queries, keys, values = (x.to(dtype) for x in paint(scene, size, heads, (*key, layer)))
        samples[layer] = _last_outputs(geometry, queries, keys, values)
        sequence.append(layer, queries=queries, query_steps=rows, keys=keys, values=values)
    tokens, text = _tokens(scene, size, stream("tokens", *key))
    sequence.finish(tokens=tokens, positions=rows, text=text, output_samples=samples)


def _last_outputs(geometry: Geometry, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """[H, SAMPLED, D] float32, attention of the last steps over all rows before them, in float64."""
    steps = torch.arange(queries.shape[1] - min(SAMPLED, queries.shape[1]), queries.shape[1])
    wide_keys, wide_values = (x.to(torch.float64).repeat_interleave(geometry.group, 0) for x in (keys, values))
    logits = geometry.scale * queries[:, steps].to(torch.float64) @ wide_keys.transpose(1, 2)
    logits.masked_fill_(torch.arange(keys.shape[1]) > steps[:, None], -torch.inf)
    return (logits.softmax(-1) @ wide_values).to(torch.float32)


def _tokens(scene: Scene, size: Size, make: torch.Generator) -> tuple[Tensor, list[bytes]]:
    """Token ids [T] and their text: landmarks read as their names, the rest as words without meaning."""
    tokens = torch.randint(0, WORDS, (size.tokens,), generator=make)
    text = [f"w{token} ".encode() for token in tokens.tolist()]
    for place, (name, rows) in enumerate(scene.landmarks.items()):
        for row in rows:
            tokens[row], text[row] = WORDS + place, f"{name} ".encode()
    return tokens, text
