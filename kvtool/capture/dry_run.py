"""The dry run: what a capture would take, and whether that is allowed."""

from __future__ import annotations

from kvtool.capture.estimate import Estimate, LayerShape, disk_bytes, memory_bytes, meta_shapes
from kvtool.capture.gradient_estimate import gradient_disk_bytes, gradient_memory_bytes
from kvtool.capture.loading import skeleton
from kvtool.capture.packages import require
from kvtool.capture.prepare import Notes, Prepared, dtype_name, prepare
from kvtool.capture.probe import Probed, probe
from kvtool.capture.quiet import quiet, threads
from kvtool.capture.recorder import SAMPLE_STEPS
from kvtool.capture.request import Request, parse_memory
from kvtool.errors import KvtoolError
from kvtool.words import parse_ids, size


def dry_run(request: Request, *, notes: Notes | None = None) -> Estimate:
    """What `run` would take: tokens, disk, memory. Weights are read only where sizes depend on values."""
    request.check(output_needed=False)
    require("transformers")
    notes = notes or (lambda text: None)
    with quiet(), threads(request.threads):
        estimate = estimate_of(request, prepare(request, notes))
    within_memory(request, estimate)
    return estimate


def estimate_of(request: Request, ready: Prepared) -> Estimate:
    """Sizes from a skeleton of the model; where a skeleton cannot run, the model itself is probed."""
    bare = skeleton(ready.config, ready.dtype)
    item = ready.dtype.itemsize
    weights = sum(p.numel() * p.element_size() for p in bare.parameters())
    shapes = meta_shapes(bare)
    if shapes is None:
        limit = parse_memory(request.max_memory)
        if limit is not None and weights > limit:
            raise _too_large(weights, limit, ready)
        shapes = {layer: _shape(entry) for layer, entry in probe(ready.load_model(lambda text: None)).items()}
    wanted = parse_ids(request.layers, "--layers")
    stored_shapes = {layer: shape for layer, shape in shapes.items() if wanted is None or layer in wanted}
    text = max((len(piece) for piece in ready.tokenization.pieces(list(ready.inputs[0].prompt[:512]))), default=1)
    plan, disk, memory = request.gradient_plan, 0, 0
    if plan is not None:
        disk = gradient_disk_bytes(stored_shapes, ready.inputs, plan, ready.stored.itemsize)
        memory = gradient_memory_bytes(shapes, ready.inputs, plan, item, ready.config)
    return Estimate(
        sequences=[(item_.name, len(item_.prompt), item_.most_tokens) for item_ in ready.inputs],
        layers=len(stored_shapes),
        disk_bytes=disk_bytes(
            stored_shapes,
            ready.inputs,
            request.query_selection,
            ready.stored.itemsize,
            item,
            request.output_projection,
            min(text, 4),
            SAMPLE_STEPS,
        )
        + disk,
        memory_bytes=memory_bytes(shapes, ready.inputs, request.chunk, weights, item, ready.config) + memory,
        weight_bytes=weights,
        run_dtype=dtype_name(ready.dtype),
        stored_dtype=dtype_name(ready.stored),
        gradient_bytes=disk,
    )


def _shape(entry: Probed) -> LayerShape:
    g, matrix = entry.geometry, entry.output_projection()
    return LayerShape(
        g.query_heads,
        g.kv_heads,
        g.key_dim,
        g.value_dim,
        g.kv_source is not None,
        None if matrix is None else matrix.shape[-1],
    )


def within_memory(request: Request, estimate: Estimate) -> None:
    """Refuse an estimate above --max-memory, with code `memory`."""
    limit = parse_memory(request.max_memory)
    if limit is not None and estimate.memory_bytes > limit:
        raise KvtoolError(
            "memory",
            f"the capture would take about {size(estimate.memory_bytes)}, of which weights "
            f"{size(estimate.weight_bytes)} as {estimate.run_dtype}, more than --max-memory {size(limit)}",
            "run in a narrower --model-dtype, use --chunk, or shorten the prompt"
            + ("" if request.gradients is None else "; --gradient-block bounds what --gradients needs"),
        )


def _too_large(weights: int, limit: int, ready: Prepared) -> KvtoolError:
    return KvtoolError(
        "memory",
        f"the weights alone take {size(weights)} as {dtype_name(ready.dtype)}, more than --max-memory {size(limit)}",
        "run in a narrower --model-dtype",
    )
