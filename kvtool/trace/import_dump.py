"""Import: a dump, read tensor by tensor, written as a trace."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import torch
from torch import Tensor

from kvtool.layer import Geometry
from kvtool.trace.dump import Dump, fault
from kvtool.trace.layout import dtype_name
from kvtool.trace.writer import TraceWriter


def import_dump(dump: str | os.PathLike[str], output: str | os.PathLike[str], *, force: bool = False) -> None:
    """Turn a dump into a trace at `output`; the stored dtype is the dump's own.

    Raises:
        KvtoolError: `dump`, `dtype`, `shape`, `not-finite` for a dump that does not hold what it should,
            and whatever writing a trace can raise. Nothing is left behind then.
    """
    source = Dump(Path(dump))
    geometries = [
        {layer: source.geometry(index, layer) for layer in sorted(layers)}
        for index, layers in sorted(source.sequences.items())
    ]
    capture = {
        "source": "import",
        "dump": source.path.name,
        "dump_sha256": _digest(source.path),
        "run_dtype": dtype_name(source.dtype),
    }
    with TraceWriter(
        output,
        model={"name": source.model},
        tokenizer=None,
        capture=capture,
        dtype=source.dtype,
        force=force,
        planned=len(geometries),
    ) as writer:
        for layer in source.projections:
            writer.output_projection(layer, source.tensor(f"model.layers.{layer}.output_projection", 3))
        for index, layers in enumerate(geometries):
            _import_sequence(source, writer, index, layers)


def _import_sequence(source: Dump, writer: TraceWriter, index: int, layers: dict[int, Geometry]) -> None:
    stem = f"sequences.{index}"
    tokens = source.tensor(f"{stem}.tokens", 1, whole=True)
    if bool((tokens < 0).any()) or bool((tokens > 2**31 - 1).any()):
        raise fault(f"{stem}.tokens holds numbers that are no token ids")
    positions = torch.arange(len(tokens))
    if f"{stem}.positions" in source.names:
        positions = source.tensor(f"{stem}.positions", 1, whole=True)
    sequence = writer.sequence(
        layers,
        prompt_length=source.prompt_lengths[index],
        keys_rotated={layer: source.layers[layer].keys_rotated for layer in layers},
    )
    samples: dict[int, Tensor] = {}
    for layer, geometry in layers.items():
        name = f"{stem}.layers.{layer}"
        queries = source.tensor(f"{name}.queries", 3)
        steps = torch.arange(len(tokens) - queries.shape[1], len(tokens))
        if f"{name}.query_steps" in source.names:
            steps = source.tensor(f"{name}.query_steps", 1, whole=True)
        if geometry.kv_source is None:
            sequence.append(layer, keys=source.tensor(f"{name}.keys", 3), values=source.tensor(f"{name}.values", 3))
        sequence.append(layer, queries=queries, query_steps=steps)
        if f"{name}.output_sample" in source.names:
            samples[layer] = source.tensor(f"{name}.output_sample", 3)
    sequence.finish(tokens=tokens, positions=positions, output_samples=samples)


def _digest(path: Path) -> str:
    """SHA-256 of one file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
