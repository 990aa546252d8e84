"""Run every input and write its sequence."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch

from kvtool.capture.feeding import later_tokens
from kvtool.capture.generation import Decoding, Feed, generate
from kvtool.capture.gradients import draw_gradients
from kvtool.capture.hook import observed
from kvtool.capture.inputs import Input
from kvtool.capture.loading import Loaded
from kvtool.capture.manifest import capture_manifest, model_manifest, sequence_attributes
from kvtool.capture.outcome import SequenceOutcome
from kvtool.capture.prepare import Prepared, Progress
from kvtool.capture.probe import Probed, position_limit
from kvtool.capture.recorder import Recorder
from kvtool.capture.request import Request
from kvtool.capture.rotation_watch import RotaryState
from kvtool.errors import KvtoolError
from kvtool.trace import Trace, TraceWriter


def write_sequences(
    request: Request,
    ready: Prepared,
    loaded: Loaded,
    probed: dict[int, Probed],
    progress: Progress,
    argv: list[str] | None,
    check: Callable[[Trace], None],
) -> list[SequenceOutcome]:
    """Run every input in turn; the trace is published when all are whole and `check` accepts it."""
    assert request.output is not None
    plan = request.gradient_plan
    total = sum(item.most_tokens for item in ready.inputs)
    if plan is not None:
        total += sum(plan.work(len(item.prompt), item.most_tokens) for item in ready.inputs)
    done, outcomes = 0, []
    with TraceWriter(
        request.output,
        model=model_manifest(loaded),
        tokenizer=ready.tokenization.manifest(),
        capture=capture_manifest(request, loaded, argv),
        dtype=ready.stored,
        force=request.force,
        planned=len(ready.inputs),
        check=check,
    ) as writer:
        if request.output_projection:
            for layer, entry in probed.items():
                matrix = entry.output_projection()
                if matrix is not None:
                    writer.output_projection(layer, matrix)
        rotary = RotaryState(loaded.model)
        later = later_tokens(loaded.model, position_limit(loaded.model.config))
        if later is not None and plan is not None:
            raise KvtoolError(
                "model-unsupported",
                f"{type(loaded.model).__name__} continues a sequence only token by token, so it has no gradients",
                "capture without --gradients",
            )
        rotary.restore()
        for item in ready.inputs:

            def count(tokens: int) -> None:
                nonlocal done
                done += tokens
                progress("capturing", done, total)

            rotary.restore()
            outcomes.append(_sequence(request, ready, loaded.model, probed, writer, item, count, rotary, later))
    return outcomes


def _sequence(
    request: Request,
    ready: Prepared,
    model: Any,
    probed: dict[int, Probed],
    writer: TraceWriter,
    item: Input,
    count: Callable[[int], None],
    rotary: RotaryState,
    later: int | None,
) -> SequenceOutcome:
    """Run one input and write its sequence."""
    prompt = list(item.prompt)
    _refuse_unknown_tokens(model, max((*prompt, *item.forced)))
    attributes = sequence_attributes(request, item)
    sink = writer.sequence(
        {layer: entry.geometry for layer, entry in probed.items()}, prompt_length=len(prompt), attributes=attributes
    )
    known = None if item.new_tokens else item.most_tokens
    plan = request.gradient_plan
    kept = None if plan is None else plan.differentiated(len(prompt))
    recorder = Recorder(model, probed, len(prompt), request.query_selection, known, sink, kept)
    feed = Feed(model, chunk=request.chunk, later=later, around=recorder.forward, progress=count)
    stop = stop_tokens(model) | ready.tokenization.stop_tokens
    with observed(model, recorder), recorder.watching():
        logits = feed.push(prompt)
        # Layers with a window forget the prompt while they go on.
        primed = feed.fork() if plan is not None and plan.at == "continuation" else None
        if item.new_tokens:
            decoding = Decoding(request.temperature or 0.0, request.top_k, request.top_p)
            seed = sequence_seed(request.seed, prompt)
            after = list(generate(feed, logits, item.new_tokens, stop, decoding, seed))
        else:
            after = list(item.forced)
            feed.push(after)
    tokens = prompt + after
    pieces = ready.tokenization.pieces(tokens)
    geometries = recorder.finish()
    samples = recorder.samples()
    gradients: dict[str, Any] = {}
    if plan is not None:
        rotary.restore()
        drawn = draw_gradients(model, primed or Feed(model), plan, tokens, len(prompt), geometries, recorder.ran, count)
        gradients = {"gradients": drawn.how, "gradient_steps": drawn.steps, "output_gradients": drawn.arrays}
    sink.finish(
        tokens=torch.tensor(tokens),
        positions=torch.arange(len(tokens)),
        text=pieces,
        output_samples=samples,
        geometries=geometries,
        **gradients,
    )
    return SequenceOutcome(
        name=item.name,
        prompt_tokens=len(prompt),
        tokens=len(tokens),
        stopped=None if not item.new_tokens else "end-of-text" if after[-1] in stop else "length",
        text=b"".join(pieces[len(prompt) :]).decode(errors="replace") if item.new_tokens else None,
        gradients=gradients.get("gradients"),
    )


def _refuse_unknown_tokens(model: Any, largest: int) -> None:
    known = int(model.get_input_embeddings().weight.shape[0])
    if largest >= known:
        raise KvtoolError(
            "model-load",
            f"the tokenizer gives token {largest}, but the model knows only {known}",
            "tokenizer and weights belong to different models",
        )


def stop_tokens(model: Any) -> frozenset[int]:
    """The model's own end-of-text tokens."""
    settings = getattr(model, "generation_config", None)
    ends = getattr(settings, "eos_token_id", None)
    ends = getattr(model.config.get_text_config(), "eos_token_id", None) if ends is None else ends
    return frozenset() if ends is None else frozenset(int(e) for e in (ends if isinstance(ends, list) else [ends]))


def sequence_seed(seed: int, prompt: list[int]) -> int:
    """Seed of one sequence's draws: a function of the user's seed and the prompt, not of its place in the run."""
    digest = hashlib.sha256(f"{seed}:{','.join(map(str, prompt))}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
