"""A small trace with everything in it: two layers with a gap, a donor, sinks, rotation, text, projection."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvtool.layer import Geometry
from kvtool.rotation import Rotation
from kvtool.trace import TraceWriter

HEADS, KV_HEADS, KEY_DIM, VALUE_DIM, WIDTH = 4, 2, 6, 5, 7


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def geometries() -> dict[int, Geometry]:
    rotation = Rotation(4, "half", inv_freq=torch.tensor([1.0, 0.1]), attention_scaling=1.25, rotary_start=2)
    full = Geometry(3, HEADS, KV_HEADS, KEY_DIM, VALUE_DIM, 0.3, rotation=rotation, softcap=20.0)
    sharing = Geometry(
        11,
        HEADS,
        KV_HEADS,
        KEY_DIM,
        VALUE_DIM,
        0.4,
        kind="sliding",
        window=9,
        sink_logits=torch.tensor([0.5, -1.0, 2.0, 0.25]),
        rotation="none",
        kv_source=3,
    )
    return {3: full, 11: sharing}


def naive_output(queries: Tensor, keys: Tensor, values: Tensor, geometry: Geometry, step: int) -> Tensor:
    """Attention of one step in float64, one number at a time; `queries` [H, D] of that step."""
    out = torch.zeros(geometry.query_heads, values.shape[2], dtype=torch.float64)
    for head in range(geometry.query_heads):
        donor = head // (geometry.query_heads // keys.shape[0])
        logits = {}
        for row in range(step + 1):
            if geometry.kind == "sliding" and step - row >= geometry.window:
                continue
            if geometry.kind == "chunked" and row // geometry.window != step // geometry.window:
                continue
            logit = float((queries[head].double() * keys[donor, row].double()).sum()) * geometry.scale
            if geometry.softcap is not None:
                logit = geometry.softcap * float(
                    torch.tanh(torch.tensor(logit / geometry.softcap, dtype=torch.float64))
                )
            logits[row] = logit
        sink = None if geometry.sink_logits is None else float(geometry.sink_logits[head])
        highest = max([*logits.values(), *([] if sink is None else [sink])])
        total = sum(2.718281828459045 ** (z - highest) for z in logits.values())
        total += 0.0 if sink is None else 2.718281828459045 ** (sink - highest)
        for row, logit in logits.items():
            out[head] += 2.718281828459045 ** (logit - highest) / total * values[donor, row].double()
    return out


def write_trace(
    path: Path,
    *,
    dtype: torch.dtype = torch.float32,
    lengths: tuple[int, ...] = (40, 23),
    samples: bool = True,
    force: bool = False,
    archive: bool = False,
    zero_values: bool = False,
    run_dtype: str = "float32",
) -> Path:
    """Write the trace. Arrays of sequence s are seeded by s."""
    with TraceWriter(
        path,
        model={"name": "toy"},
        tokenizer={"digest": "ab"},
        capture={"run_dtype": run_dtype},
        dtype=dtype,
        force=force,
        archive=archive,
        planned=len(lengths),
    ) as writer:
        writer.output_projection(3, torch.randn(HEADS, VALUE_DIM, WIDTH, generator=torch.Generator().manual_seed(9)))
        for index, count in enumerate(lengths):
            made = geometries()
            sequence = writer.sequence(made, prompt_length=count - 5, attributes={"id": f"s{index}", "seed": index})
            random = torch.Generator().manual_seed(index)
            keys = torch.randn(KV_HEADS, count, KEY_DIM, generator=random)
            values = torch.randn(KV_HEADS, count, VALUE_DIM, generator=random)
            if zero_values:
                values[1] = 0
            outputs = {}
            for layer in made:
                queries = torch.randn(HEADS, count, KEY_DIM, generator=random)
                if layer == 3:
                    sequence.append(3, keys=keys, values=values)
                sequence.append(layer, queries=queries, query_steps=torch.arange(count))
                steps = range(count - 3, count)
                outputs[layer] = torch.stack(
                    [naive_output(queries[:, t], keys, values, made[layer], t) for t in steps], dim=1
                ).float()
            sequence.finish(
                tokens=torch.arange(count) + 100 * index,
                positions=torch.arange(count) + 7,
                text=[f"w{row} ".encode() for row in range(count)],
                output_samples=outputs if samples else None,
            )
    return path


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Each variant of the trace is written once and only copied after that."""
    root, known = tmp_path_factory.mktemp("traces"), {}

    def find(**options: object) -> Path:
        key = repr(sorted(options.items()))
        if key not in known:
            known[key] = write_trace(root / f"{len(known)}.zarr", **options)
        return known[key]

    return find


@pytest.fixture
def make_trace(tmp_path: Path, written: Callable[..., Path]) -> Callable[..., Path]:
    """A private copy of the trace, to read or to damage."""

    def make(**options: object) -> Path:
        return shutil.copytree(written(**options), tmp_path / "run.zarr")

    return make
