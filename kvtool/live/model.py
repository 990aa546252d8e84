"""The model of a live run: loaded as for a capture, and held against the trace that decides for it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from kvtool.capture.converted import converted
from kvtool.capture.feeding import later_tokens
from kvtool.capture.loading import load_config, load_model, load_tokenizer, run_dtype
from kvtool.capture.packages import require
from kvtool.capture.probe import Probed, position_limit, probe
from kvtool.capture.request import parse_dtype
from kvtool.capture.source import PACKAGED, Source, find_source
from kvtool.capture.tokenization import Tokenization
from kvtool.errors import KvtoolError
from kvtool.layer import Geometry
from kvtool.trace import Sequence, Trace


@dataclass(frozen=True, eq=False)
class LiveModel:
    """A model ready to run a trace's tokens.

    Attributes:
        model: in evaluation mode, on the CPU.
        source: where it came from.
        dtype: the run's.
        probed: its attention layers by id.
        later: tokens that one forward may add to a cache that is not empty, None for any number.
    """

    model: Any
    source: Source
    dtype: torch.dtype
    probed: dict[int, Probed]
    later: int | None = None

    @cached_property
    def tokenization(self) -> Tokenization:
        """Its tokenizer, loaded when text is asked for."""
        return Tokenization(load_tokenizer(self.source))


def find(model: str, trace: Trace, *, online: bool, other_weights: bool, notes: Callable[[str], None]) -> Source:
    """Where `model` lies, its weights being those of the trace.

    Args:
        other_weights: admit files with another digest, such as the same weights in another format.

    Raises:
        KvtoolError: `model-differs`, and what kvtool.capture.source.find_source raises.
    """
    source = find_source(model, online=online)
    if source.gguf:
        require("gguf", "accelerate")
    recorded = trace.manifest["model"].get("weight_digest")
    if not other_weights and recorded != source.weight_digest:
        told = "does not say which weights it was captured with"
        if recorded is not None:
            told = f"was captured with weights {str(recorded)[:12]}, and {source.name} has {source.weight_digest[:12]}"
        raise KvtoolError(
            "model-differs",
            f"{trace.shown.rpartition('/')[2]} {told}",
            "give the model that was captured; --other-weights admits other files of the same weights",
        )
    return converted(source, notes) if model == PACKAGED else source


def load(source: Source, trace: Trace, model_dtype: str | None) -> LiveModel:
    """The model in `model_dtype`, by default the dtype of the captured run."""
    config = load_config(source)
    recorded = (trace.manifest.get("capture") or {}).get("run_dtype")
    asked = parse_dtype(model_dtype, "--model-dtype") or parse_dtype(recorded, "the trace's run_dtype")
    dtype = run_dtype(source, config, asked)
    model = load_model(source, config, dtype)
    return LiveModel(model, source, dtype, probe(model), later_tokens(model, position_limit(config)))


def check_sequence(ready: LiveModel, sequence: Sequence) -> None:
    """Hold tokens, positions and layers of a sequence against the model.

    Raises:
        KvtoolError: code `model-differs`; `usage` for positions that a cache of the model cannot have.
    """
    name = type(ready.model).__name__
    vocabulary = int(ready.model.config.get_text_config().vocab_size)
    largest = int(sequence.tokens.max())
    if largest >= vocabulary:
        raise KvtoolError(
            "model-differs", f"sequence {sequence.index} holds the token {largest}, {name} knows {vocabulary}"
        )
    if not torch.equal(sequence.positions, torch.arange(sequence.length)):
        raise KvtoolError(
            "usage", f"sequence {sequence.index} has positions of its own, and a live run counts them from 0"
        )
    for layer in sequence.layer_ids:
        stored = sequence.geometry(layer)
        if layer not in ready.probed:
            raise KvtoolError("model-differs", f"{name} has no attention in layer {layer}, which the trace holds")
        own = ready.probed[layer].geometry
        for word in ("query_heads", "kv_heads", "key_dim", "value_dim", "kind", "window", "kv_source"):
            mine, theirs = getattr(own, word), getattr(stored, word)
            if mine != theirs:
                raise KvtoolError(
                    "model-differs", f"layer {layer} has {word} {mine} in {name} and {theirs} in the trace"
                )
        for word in ("scale", "softcap"):
            numbers = getattr(own, word), getattr(stored, word)
            alike = numbers[0] == numbers[1] if None in numbers else math.isclose(*numbers, rel_tol=1e-6)
            if not alike:
                raise KvtoolError(
                    "model-differs", f"layer {layer} has {word} {numbers[0]} in {name} and {numbers[1]} in the trace"
                )
        _check_sinks(own, stored, name)


def _check_sinks(own: Geometry, stored: Geometry, name: str) -> None:
    mine, theirs = own.sink_logits, stored.sink_logits
    alike = (mine is None) == (theirs is None)
    if alike and mine is not None and theirs is not None:
        # Stored in the run's dtype or wider: only bfloat16's rounding may part them.
        alike = torch.allclose(mine.to(torch.float32), theirs.to(torch.float32), rtol=1e-2, atol=1e-3)
    if not alike:
        raise KvtoolError("model-differs", f"layer {stored.layer} has other sink logits in {name} than in the trace")
