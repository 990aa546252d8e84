"""Small traces with every kind of layer, from random numbers, with whatever a test plants in them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from kvtool.layer import Geometry, Gradients
from kvtool.trace import Trace, TraceWriter, open_trace

HEADS, KV_HEADS, KEY_DIM, VALUE_DIM, WIDTH = 4, 2, 4, 3, 5
BEHIND = 8  # rows behind the prompt
Arrays = dict[str, Tensor]
Plant = Callable[[int, int, Arrays], None]  # sequence, layer (-1: what belongs to the sequence), arrays to change


def geometries() -> dict[int, Geometry]:
    """Full with a softcap, sliding with sink logits, chunked, and one that reads the first one's cache in a window."""
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
    *,
    lengths: tuple[int, ...] = (26, 19),
    made: dict[int, Geometry] | None = None,
    plant: Plant | None = None,
    dtype: torch.dtype = torch.float32,
    run_dtype: str = "float32",
    query_steps: Callable[[int], Tensor] = torch.arange,
    text: bool = True,
    samples: bool = True,
    draws: int = 0,
    capture: dict[str, object] | None = None,
) -> Trace:
    """`query_steps` gives the rows with a query of a sequence of that length."""
    made = geometries() if made is None else made
    change = plant or (lambda sequence, layer, arrays: None)
    with TraceWriter(
        path,
        model={"name": "toy"},
        tokenizer=None,
        capture={"run_dtype": run_dtype, **(capture or {})},
        dtype=dtype,
    ) as writer:
        for index, geometry in made.items():
            shape = (geometry.query_heads, geometry.value_dim, WIDTH)
            arrays = {"output_projection": torch.randn(shape, generator=torch.Generator().manual_seed(100 + index))}
            change(-1, index, arrays)
            writer.output_projection(index, arrays["output_projection"])
        for number, count in enumerate(lengths):
            _sequence(writer, number, count, made, change, query_steps(count), text, samples, draws)
    return open_trace(path)


def _sequence(
    writer: TraceWriter,
    number: int,
    count: int,
    made: dict[int, Geometry],
    change: Plant,
    steps: Tensor,
    text: bool,
    samples: bool,
    draws: int,
) -> None:
    prompt = count - BEHIND
    sequence = writer.sequence(made, prompt_length=prompt, attributes={"seed": number})
    outputs, slopes = {}, {}
    for index, geometry in made.items():
        stream = torch.Generator().manual_seed(1000 * number + index)
        heads, kv_heads = geometry.query_heads, geometry.kv_heads
        arrays = {
            "queries": torch.randn(heads, count, geometry.key_dim, generator=stream),
            "keys": torch.randn(kv_heads, count, geometry.key_dim, generator=stream),
            "values": torch.randn(kv_heads, count, geometry.value_dim, generator=stream),
            "output_sample": torch.randn(heads, 3, geometry.value_dim, generator=stream),
            "output_gradients": torch.randn(max(draws, 1), heads, 6, geometry.value_dim, generator=stream),
        }
        change(number, index, arrays)
        if geometry.kv_source is None:
            sequence.append(index, keys=arrays["keys"], values=arrays["values"])
        sequence.append(index, queries=arrays["queries"][:, steps], query_steps=steps)
        outputs[index], slopes[index] = arrays["output_sample"], arrays["output_gradients"]
    own = {"tokens": torch.arange(count) + 100 * number, "positions": torch.arange(count) + 7}
    change(number, -1, own)
    gradient_steps = torch.arange(count - 7, count - 1)
    drawn = Gradients(draws, 6, "continuation", (count - 7, count - 1), 6, 0) if draws else None
    sequence.finish(
        **own,
        text=[f"w{row}\n".encode() for row in range(count)] if text else None,
        output_samples=outputs if samples else None,
        gradients=drawn,
        gradient_steps=gradient_steps if draws else None,
        output_gradients=slopes if draws else None,
    )
