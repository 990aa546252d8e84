"""One capture from request to published, checked trace."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvtool.capture.converted import converted
from kvtool.capture.estimate import Estimate, LayerShape, disk_bytes, memory_bytes, meta_shapes, size
from kvtool.capture.generation import Decoding, Feed, generate
from kvtool.capture.hook import observed
from kvtool.capture.inputs import Input, read_inputs
from kvtool.capture.layers import chosen_layers, say_gaps
from kvtool.capture.loading import Loaded, load_config, load_model, load_tokenizer, run_dtype, skeleton
from kvtool.capture.manifest import capture_manifest, model_manifest, sequence_attributes
from kvtool.capture.outcome import Outcome, SequenceOutcome
from kvtool.capture.packages import require
from kvtool.capture.probe import Probed, probe
from kvtool.capture.quiet import quiet, threads
from kvtool.capture.recorder import SAMPLE_STEPS, Recorder
from kvtool.capture.request import Request, parse_dtype, parse_layers, parse_memory
from kvtool.capture.rotation import RotaryState
from kvtool.capture.source import PACKAGED, Source, find_source
from kvtool.capture.tokenization import Tokenization
from kvtool.errors import KvtoolError
from kvtool.trace import TraceWriter, open_trace
from kvtool.trace.recompute import accuracy_error, recompute

Progress = Callable[[str, int, int | None], None]
Notes = Callable[[str], None]


@dataclass(frozen=True, eq=False)
class _Prepared:
    """Everything that is known before the weights are loaded."""

    source: Source
    config: Any
    tokenizer: Any
    tokenization: Tokenization
    inputs: list[Input]
    dtype: torch.dtype
    stored: torch.dtype


def run(
    request: Request, *, progress: Progress | None = None, notes: Notes | None = None, argv: list[str] | None = None
) -> Outcome:
    """Capture what `request` says.

    Args:
        progress: called with (stage, tokens done, tokens in all or None).
        notes: called with one sentence about anything the user should know.
        argv: command line, for the manifest.

    Raises:
        KvtoolError: see docs/capture.md; nothing is published then.
    """
    request.check()
    require("transformers")
    progress, notes = progress or (lambda stage, done, total: None), notes or (lambda text: None)
    with quiet(), threads(request.threads):
        progress("loading", 0, None)
        ready = _prepare(request, notes)
        if request.max_memory is not None:
            _within_memory(request, _estimate(request, ready))
        model = load_model(ready.source, ready.config, ready.dtype)
        loaded = Loaded(model, ready.tokenizer, ready.source, ready.dtype)
        progress("probing", 0, None)
        probed = chosen_layers(request, probe(model))
        say_gaps(request, probed, notes)
        sequences = _write(request, ready, loaded, probed, progress, argv)
    return _checked(request, sequences, sorted(probed), progress)


def dry_run(request: Request, *, notes: Notes | None = None) -> Estimate:
    """What `run` would take: tokens, disk, memory. Weights are read only where sizes depend on values."""
    request.check(output_needed=False)
    require("transformers")
    notes = notes or (lambda text: None)
    with quiet(), threads(request.threads):
        estimate = _estimate(request, _prepare(request, notes))
    _within_memory(request, estimate)
    return estimate


def _prepare(request: Request, notes: Notes) -> _Prepared:
    source = find_source(request.model, online=request.online)
    if source.gguf:
        require("gguf", "accelerate")  # transformers reads GGUF through both
    if request.model == PACKAGED:
        source = converted(source, notes)
    config = load_config(source)
    dtype = run_dtype(source, config, parse_dtype(request.model_dtype, "--model-dtype"))
    stored_name = parse_dtype(request.dtype, "--dtype")
    stored = dtype if stored_name is None else getattr(torch, stored_name)
    if torch.promote_types(dtype, stored) != stored:
        notes(f"queries, keys and values of the {_name(dtype)} run are rounded to {_name(stored)} in the trace")
    tokenizer = load_tokenizer(source)
    tokenization = Tokenization(tokenizer)
    inputs = read_inputs(request, tokenization, most_positions(config))
    return _Prepared(source, config, tokenizer, tokenization, inputs, dtype, stored)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def most_positions(config: Any) -> int | None:
    """The longest sequence that the model is made for; None where its rotation stretches with the text."""
    text = config.get_text_config()
    parameters = getattr(text, "rope_parameters", None) or {}
    if parameters.get("rope_type") == "dynamic":
        return None
    limit = getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None)
    return None if limit is None else int(limit)


def _estimate(request: Request, ready: _Prepared) -> Estimate:
    bare = skeleton(ready.config, ready.dtype)
    item = ready.dtype.itemsize
    weights = sum(p.numel() * p.element_size() for p in bare.parameters())
    shapes = meta_shapes(bare)
    if shapes is None:
        limit = parse_memory(request.max_memory)
        if limit is not None and weights > limit:
            raise _too_large(weights, limit, ready)
        shapes = {layer: _shape(entry) for layer, entry in probe(load_model_of(ready)).items()}
    wanted = parse_layers(request.layers)
    stored_shapes = {layer: shape for layer, shape in shapes.items() if wanted is None or layer in wanted}
    text = max((len(piece) for piece in ready.tokenization.pieces(list(ready.inputs[0].prompt[:512]))), default=1)
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
        ),
        memory_bytes=memory_bytes(shapes, ready.inputs, request.chunk, weights, item, ready.config),
        weight_bytes=weights,
        run_dtype=_name(ready.dtype),
        stored_dtype=_name(ready.stored),
    )


def load_model_of(ready: _Prepared) -> Any:
    """The model that `ready` describes."""
    return load_model(ready.source, ready.config, ready.dtype)


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


def _within_memory(request: Request, estimate: Estimate) -> None:
    limit = parse_memory(request.max_memory)
    if limit is not None and estimate.memory_bytes > limit:
        raise KvtoolError(
            "memory",
            f"the capture would take about {size(estimate.memory_bytes)}, of which weights "
            f"{size(estimate.weight_bytes)} as {estimate.run_dtype}, more than --max-memory {size(limit)}",
            "run in a narrower --model-dtype, use --chunk, or shorten the prompt",
        )


def _too_large(weights: int, limit: int, ready: _Prepared) -> KvtoolError:
    return KvtoolError(
        "memory",
        f"the weights alone take {size(weights)} as {_name(ready.dtype)}, more than --max-memory {size(limit)}",
        "run in a narrower --model-dtype",
    )


def _write(
    request: Request,
    ready: _Prepared,
    loaded: Loaded,
    probed: dict[int, Probed],
    progress: Progress,
    argv: list[str] | None,
) -> list[SequenceOutcome]:
    assert request.output is not None
    total = sum(item.most_tokens for item in ready.inputs)
    done, outcomes = 0, []
    with TraceWriter(
        request.output,
        model=model_manifest(loaded),
        tokenizer=ready.tokenization.manifest(),
        capture=capture_manifest(request, loaded, argv),
        dtype=ready.stored,
        force=request.force,
        planned=len(ready.inputs),
    ) as writer:
        if request.output_projection:
            for layer, entry in probed.items():
                matrix = entry.output_projection()
                if matrix is not None:
                    writer.output_projection(layer, matrix)
        rotary = RotaryState(loaded.model)
        for item in ready.inputs:

            def count(tokens: int) -> None:
                nonlocal done
                done += tokens
                progress("capturing", done, total)

            rotary.restore()
            outcomes.append(_sequence(request, ready, loaded.model, probed, writer, item, count))
    return outcomes


def _sequence(
    request: Request,
    ready: _Prepared,
    model: Any,
    probed: dict[int, Probed],
    writer: TraceWriter,
    item: Input,
    count: Callable[[int], None],
) -> SequenceOutcome:
    """Run one input and write its sequence."""
    prompt = list(item.prompt)
    attributes = sequence_attributes(request, item)
    sink = writer.sequence(
        {layer: entry.geometry for layer, entry in probed.items()}, prompt_length=len(prompt), attributes=attributes
    )
    known = None if item.new_tokens else item.most_tokens
    recorder = Recorder(model, probed, len(prompt), request.query_selection, known, sink)
    feed = Feed(model, chunk=request.chunk, around=recorder.forward, progress=count)
    stop = stop_tokens(model) | ready.tokenization.stop_tokens
    with observed(model, recorder), recorder.watching():
        if item.new_tokens:
            decoding = Decoding(request.temperature or 0.0, request.top_k, request.top_p)
            seed = sequence_seed(request.seed, prompt)
            after = list(generate(feed, prompt, item.new_tokens, stop, decoding, seed))
        else:
            feed.push(prompt)
            after = list(item.forced)
            feed.push(after)
    tokens = prompt + after
    pieces = ready.tokenization.pieces(tokens)
    geometries = recorder.finish()
    sink.finish(
        tokens=torch.tensor(tokens),
        positions=torch.arange(len(tokens)),
        text=pieces,
        output_samples=recorder.samples(),
        geometries=geometries,
    )
    return SequenceOutcome(
        name=item.name,
        prompt_tokens=len(prompt),
        tokens=len(tokens),
        stopped=None if not item.new_tokens else "end-of-text" if after[-1] in stop else "length",
        text=b"".join(pieces[len(prompt) :]).decode(errors="replace") if item.new_tokens else None,
    )


def stop_tokens(model: Any) -> frozenset[int]:
    """The model's own end-of-text tokens."""
    settings = getattr(model, "generation_config", None)
    ends = getattr(settings, "eos_token_id", None)
    ends = model.config.get_text_config().eos_token_id if ends is None else ends
    return frozenset() if ends is None else frozenset(int(e) for e in (ends if isinstance(ends, list) else [ends]))


def sequence_seed(seed: int, prompt: list[int]) -> int:
    """Seed of one sequence's draws: a function of the user's seed and the prompt, not of its place in the run."""
    digest = hashlib.sha256(f"{seed}:{','.join(map(str, prompt))}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _checked(request: Request, sequences: list[SequenceOutcome], layers: list[int], progress: Progress) -> Outcome:
    """Recompute the stored samples; a trace that disagrees with the model is taken away again."""
    path = Path(request.output or "")
    trace = open_trace(path)
    results = list(recompute(trace, progress=lambda done, total, what: progress("checking", done, total)))
    fault = accuracy_error(trace, results)
    if fault is not None:
        shutil.rmtree(path)
        raise fault
    return Outcome(
        path=path,
        digest=trace.digest,
        disk_bytes=trace.total_bytes,
        layers=layers,
        sequences=sequences,
        error=max((result.error or 0.0 for result in results), default=0.0),
        bound=max(result.bound for result in results),
        run_dtype=str(trace.manifest["capture"]["run_dtype"]),
        stored_dtype=_name(trace.stored_dtype),
    )
