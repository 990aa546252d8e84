"""Prepare a capture: find the model, read its configuration and tokenizer, tokenize the input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kvtool.capture.converted import converted
from kvtool.capture.inputs import Input, read_texts, tokenize
from kvtool.capture.loading import load_config, load_model, load_tokenizer, run_dtype
from kvtool.capture.packages import require
from kvtool.capture.request import Request, parse_dtype
from kvtool.capture.source import PACKAGED, Source, find_source
from kvtool.capture.tokenization import Tokenization

Progress = Callable[[str, int, int | None], None]
Notes = Callable[[str], None]


@dataclass(frozen=True, eq=False)
class Prepared:
    """Everything that is known before the weights are loaded.

    Attributes:
        source, config, tokenizer, tokenization: of the model.
        inputs: the sequences to run.
        dtype, stored: of the run, and of queries, keys and values in the trace.
    """

    source: Source
    config: Any
    tokenizer: Any
    tokenization: Tokenization
    inputs: list[Input]
    dtype: torch.dtype
    stored: torch.dtype

    def load_model(self, notes: Notes) -> Any:
        """The model with its weights; weights that it does not use are noted."""
        return load_model(self.source, self.config, self.dtype, notes)


def prepare(request: Request, notes: Notes) -> Prepared:
    """Everything up to the weights; a stored dtype narrower than the run's is noted."""
    texts = read_texts(request)
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
        notes(
            f"queries, keys and values of the {dtype_name(dtype)} run are rounded to {dtype_name(stored)} in the trace"
        )
    tokenizer = load_tokenizer(source)
    tokenization = Tokenization(tokenizer)
    inputs = tokenize(request, texts, tokenization, most_positions(config))
    return Prepared(source, config, tokenizer, tokenization, inputs, dtype, stored)


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for torch.float32, and so on."""
    return str(dtype).removeprefix("torch.")


def most_positions(config: Any) -> int | None:
    """The longest sequence that the model is made for; None where its rotation stretches with the text."""
    text = config.get_text_config()
    parameters = getattr(text, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    if any(part.get("rope_type") == "dynamic" for part in (parameters, *nested)):
        return None
    limit = getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None)
    return None if limit is None else int(limit)
