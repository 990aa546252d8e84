"""The estimate: tokens, bytes on disk and memory of a capture, before it runs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from kvtool.capture.hook import AttentionCall, observed
from kvtool.capture.inputs import Input
from kvtool.capture.projection import linear_traffic
from kvtool.capture.request import QuerySelection
from kvtool.errors import KvtoolError
from kvtool.trace.layout import chunk_shape
from kvtool.words import size

# Bytes beside the arrays' payload, as the writer produces them: array and group metadata, and each
# file's line in COMMIT.json.
_ARRAY_METADATA, _GROUP_METADATA, _COMMIT_LINE = 620, 150, 95
_CHECKSUM = 4


@dataclass(frozen=True)
class LayerShape:
    """Sizes of one attention layer: H, Hk, D, Dv; whether it reads another's cache; M of its projection or None."""

    query_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    shared: bool
    projected: int | None


class _Shapes:
    """Observer of a forward on the meta device, where tensors have shapes but no values."""

    def __init__(self) -> None:
        self.calls: dict[int, AttentionCall] = {}

    def wants(self, layer: int) -> bool:
        return True

    def see(self, call: AttentionCall) -> None:
        self.calls[call.layer] = call


@torch.no_grad()
def meta_shapes(model: Any) -> dict[int, LayerShape] | None:
    """Layer sizes of a model without weights; None where its forward depends on values."""
    _without_values(model)
    tokens = torch.zeros(1, 8, dtype=torch.int64, device="meta")
    try:
        first, second = _Shapes(), _Shapes()
        with torch.device("meta"), observed(model, first):
            model(input_ids=tokens, use_cache=True)
        modules = {layer: call.module for layer, call in first.calls.items()}
        with torch.device("meta"), observed(model, second), linear_traffic(modules) as traffic:
            model(input_ids=tokens, use_cache=True)
    except KvtoolError:
        raise
    except Exception:
        return None
    shapes, owners = {}, set()
    for layer, call in sorted(second.calls.items()):
        # Without values, sameness is sameness of storage.
        owner = call.keys.untyped_storage()._cdata
        fed = [r for _, given, r in traffic[layer] if _same_storage(given, call.output)]
        shapes[layer] = LayerShape(
            query_heads=call.queries.shape[0],
            kv_heads=call.keys.shape[0],
            key_dim=call.queries.shape[-1],
            value_dim=call.values.shape[-1],
            shared=owner in owners,
            projected=int(fed[0].shape[-1]) if len(fed) == 1 else None,
        )
        owners.add(owner)
    return shapes


def _without_values(model: Any) -> None:
    """Make a skeleton's forward independent of values: experts pass their input on, rotations stop growing."""
    for module in model.modules():
        if type(module).__name__.endswith("Experts"):
            module.forward = lambda hidden_states, *args, **kwargs: hidden_states
        if getattr(module, "rope_type", None) == "dynamic":
            module.rope_type = "default"


def _same_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)


@dataclass(frozen=True)
class Estimate:
    """What a capture would take.

    Attributes:
        sequences: (id, prompt tokens, tokens at most) of each.
        layers: stored layers.
        disk_bytes: of the finished trace, at the maximum of tokens.
        memory_bytes: peak of the process.
        weight_bytes: of the weights in the run's dtype, part of it.
        run_dtype, stored_dtype: names.
    """

    sequences: list[tuple[str | None, int, int]]
    layers: int
    disk_bytes: int
    memory_bytes: int
    weight_bytes: int
    run_dtype: str
    stored_dtype: str
    gradient_bytes: int = 0

    def document(self) -> dict[str, Any]:
        """As JSON, schema kvtool.capture-estimate/1."""
        return {
            "schema": "kvtool.capture-estimate/1",
            "sequences": [{"id": i, "prompt_tokens": p, "most_tokens": t} for i, p, t in self.sequences],
            "tokens": sum(t for _, _, t in self.sequences),
            "layers": self.layers,
            "disk_bytes": self.disk_bytes,
            "gradient_bytes": self.gradient_bytes,
            "memory_bytes": self.memory_bytes,
            "weight_bytes": self.weight_bytes,
            "run_dtype": self.run_dtype,
            "stored_dtype": self.stored_dtype,
        }

    def text(self) -> str:
        """A few lines for people."""
        prompt, most = sum(p for _, p, _ in self.sequences), sum(t for _, _, t in self.sequences)
        count, drawn = len(self.sequences), ""
        if self.gradient_bytes:
            drawn = f", of which gradients {size(self.gradient_bytes)}"
        return "\n".join(
            [
                f"tokens   {prompt:,} of prompt, {most:,} at most, in {count} sequence{'s' * (count != 1)}",
                f"disk     {size(self.disk_bytes)} ({self.layers} layers stored as {self.stored_dtype}{drawn})",
                f"memory   about {size(self.memory_bytes)} (weights {size(self.weight_bytes)} as {self.run_dtype})",
            ]
        )


def array_bytes(name: str, shape: tuple[int, ...], item: int) -> int:
    """Bytes of one stored array: full-size chunks with checksums, metadata, and their lines in COMMIT.json."""
    chunk = chunk_shape(name, shape)
    chunks = math.prod(-(-n // c) for n, c in zip(shape, chunk, strict=True))
    return chunks * (math.prod(chunk) * item + _CHECKSUM + _COMMIT_LINE) + _ARRAY_METADATA + _COMMIT_LINE


def disk_bytes(
    shapes: dict[int, LayerShape],
    inputs: list[Input],
    selection: QuerySelection,
    stored_item: int,
    run_item: int,
    projections: bool,
    text_bytes: int,
    sample_steps: int,
) -> int:
    """Bytes of the finished trace when every sequence reaches its maximum of tokens."""
    total = 3 * (_GROUP_METADATA + _COMMIT_LINE) + 1600
    for shape in shapes.values():
        if projections and shape.projected is not None:
            total += _GROUP_METADATA + _COMMIT_LINE
            matrix = (shape.query_heads, shape.value_dim, shape.projected)
            total += array_bytes("output_projection", matrix, run_item)
    for item in inputs:
        tokens = item.most_tokens
        steps = tokens - selection.first_step(len(item.prompt), tokens)
        total += 2 * (_GROUP_METADATA + _COMMIT_LINE) + 400
        total += array_bytes("tokens", (tokens,), 4) + array_bytes("positions", (tokens,), 8)
        total += array_bytes("text", (text_bytes * tokens,), 1) + array_bytes("text_offsets", (tokens + 1,), 8)
        for shape in shapes.values():
            total += _GROUP_METADATA + _COMMIT_LINE + 350
            total += array_bytes("queries", (shape.query_heads, steps, shape.key_dim), stored_item)
            total += array_bytes("query_steps", (steps,), 8)
            sample = (shape.query_heads, min(sample_steps, steps), shape.value_dim)
            total += array_bytes("output_sample", sample, 4)
            if not shape.shared:
                total += array_bytes("keys", (shape.kv_heads, tokens, shape.key_dim), stored_item)
                total += array_bytes("values", (shape.kv_heads, tokens, shape.value_dim), stored_item)
    return total


def memory_bytes(
    shapes: dict[int, LayerShape], inputs: list[Input], chunk: int | None, weights: int, run_item: int, config: Any
) -> int:
    """Peak memory: weights, the cache of the longest sequence, the activations of its largest forward, libraries."""
    text = config.get_text_config()
    longest = max(item.most_tokens for item in inputs)
    widest = max(max(len(item.prompt), len(item.forced)) for item in inputs)
    forward = min(chunk or widest, widest)
    cache = sum(longest * s.kv_heads * (s.key_dim + s.value_dim) * run_item for s in shapes.values() if not s.shared)
    wide = (
        max(getattr(text, "intermediate_size", 0) or 0, 1)
        if not isinstance(getattr(text, "intermediate_size", 0), list)
        else max(text.intermediate_size)
    )
    hidden = getattr(text, "hidden_size", 0) or 0
    heads = max((s.query_heads * s.key_dim for s in shapes.values()), default=hidden)
    activations = forward * (6 * hidden + 3 * wide + 4 * heads) * max(run_item, 4)
    mask = forward * longest
    spools = sum(
        min(longest, 1024) * (s.query_heads * s.key_dim + s.kv_heads * (s.key_dim + s.value_dim)) * run_item
        for s in shapes.values()
    )
    return weights + cache + activations + mask + spools + 600_000_000
