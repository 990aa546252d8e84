"""Build the sample traces: `make samples`. Run it when the format or the capture changes, never to please a test."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch
from torch import Tensor

from kvtool.capture import capture
from kvtool.kernels.retained_attention.reference import attention
from kvtool.layer import Geometry
from kvtool.rotation import Rotation
from kvtool.trace import Trace, TraceWriter, open_trace

HERE = Path(__file__).parent
HEADS, KV_HEADS, DIM, WIDTH = 8, 2, 16, 24
TOKENS, PROMPT, NEEDLE = 160, 128, 40
SCALE = 1 / math.sqrt(DIM)


def sink_layer(make: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Every query gives about 60 % of its attention to token 0, whose value is almost nothing."""
    queries, keys, values = random_layer(make)
    queries[..., 0], keys[..., 0] = 4.0, 0.0
    keys[:, 0] = 0.0
    others = math.log(TOKENS * math.exp((SCALE * math.sqrt(DIM - 1)) ** 2 / 2))  # log-sum-exp of the rest
    keys[:, 0, 0] = (others + math.log(0.6 / 0.4)) / (4.0 * SCALE)
    values[:, 0] *= 0.01
    return queries, keys, values


def needle_layer(make: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """No query of the prompt looks at token NEEDLE; every later one does, and its value is large."""
    queries, keys, values = random_layer(make)
    queries[:, :PROMPT, 1], queries[:, PROMPT:, 1] = -4.0, 4.0
    keys[..., 1] = 0.0
    keys[:, NEEDLE] = 0.0
    keys[:, NEEDLE, 1] = 6.5
    values[:, NEEDLE] = 0.0
    values[:, NEEDLE, 2] = 10.0
    return queries, keys, values


def random_layer(make: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Independent normal numbers: queries [H, T, D], keys and values [Hk, T, D]."""
    return tuple(torch.randn(n, TOKENS, DIM, generator=make) for n in (HEADS, KV_HEADS, KV_HEADS))  # type: ignore[return-value]


def last_outputs(geometry: Geometry, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """[H, 8, Dv], attention output of the last 8 steps, before anything is rounded for storage."""
    steps = torch.arange(TOKENS - 8, TOKENS)
    found: Tensor = attention(
        queries[:, steps],
        keys,
        values,
        steps=steps,
        rows=torch.arange(TOKENS),
        first_visible=geometry.first_visible(steps),
        scale=geometry.scale,
        sink_logits=geometry.sink_logits,
    )
    return found


LAYERS = {0: sink_layer, 3: needle_layer, 5: random_layer}


def build_tiny(path: Path) -> Trace:
    """Synthetic, with known structure: a sink, a needle, and a sliding window with sink logits."""
    rotation = Rotation(DIM, "half", 10000.0 ** -(torch.arange(DIM // 2) / (DIM // 2)))
    shape = (HEADS, KV_HEADS, DIM, DIM, SCALE)
    geometries = {
        0: Geometry(0, *shape, rotation=rotation),
        3: Geometry(3, *shape, rotation=rotation),
        5: Geometry(5, *shape, kind="sliding", window=48, rotation=rotation, sink_logits=torch.full((HEADS,), 2.0)),
    }
    make = torch.Generator().manual_seed(2026)
    with TraceWriter(
        path,
        model={"name": "tiny-gqa (synthetic)"},
        tokenizer=None,
        capture={"run_dtype": "float32"},
        dtype=torch.float16,
        force=True,
    ) as writer:
        for layer in LAYERS:
            writer.output_projection(layer, torch.randn(HEADS, DIM, WIDTH, generator=make) / math.sqrt(HEADS * DIM))
        for name in ("first", "second"):
            sequence = writer.sequence(geometries, prompt_length=PROMPT, attributes={"id": name})
            rows, samples = torch.arange(TOKENS), {}
            for layer, build in LAYERS.items():
                queries, keys, values = build(make)
                samples[layer] = last_outputs(geometries[layer], queries, keys, values)
                sequence.append(layer, queries=queries, query_steps=rows, keys=keys, values=values)
            words = [b"needle " if row == NEEDLE else b"hay " for row in range(TOKENS)]
            sequence.finish(tokens=rows, positions=rows, text=words, output_samples=samples)
    return open_trace(path)


def build_smollm2(path: Path) -> Trace:
    """SmolLM2-135M reading two short texts: 512 tokens of prompt, 128 evaluated, five of its thirty layers."""
    return capture(
        "smollm2",
        path,
        text_file=[HERE / "texts" / "harbour.txt", HERE / "texts" / "bicycle.txt"],
        prompt_tokens=512,
        eval_tokens=128,
        layers=[0, 7, 15, 22, 29],
        dtype="float16",
        force=True,
    )


def build_gradients(path: Path) -> Trace:
    """SmolLM2-135M reading the story: all thirty layers, 64 evaluated steps, gradients of two draws."""
    return capture(
        "smollm2",
        path,
        text_file=HERE / "texts" / "harbour.txt",
        prompt_tokens=256,
        eval_tokens=64,
        gradients=2,
        gradient_probe="tokens",
        output_projection=False,
        dtype="float16",
        force=True,
    )


BUILDS = {"tiny-gqa": build_tiny, "smollm2": build_smollm2, "smollm2-gradients": build_gradients}


def main() -> None:
    wanted = sys.argv[1:] or list(BUILDS)
    digests = HERE / "DIGESTS"
    known = dict(line.split() for line in digests.read_text().splitlines()) if digests.exists() else {}
    for name, build in BUILDS.items():
        if name in wanted:
            trace = build(HERE / f"{name}.zarr")
            known[name] = trace.digest
            print(f"{name}: {trace.total_bytes / 1e6:.2f} MB, {trace.digest}")
    digests.write_text("".join(f"{name} {digest}\n" for name, digest in sorted(known.items())))


if __name__ == "__main__":
    main()
