"""The manifest: what somebody needs to repeat a capture, stored in the trace."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import Any

import torch

from kvtool.capture.hook import implementation
from kvtool.capture.inputs import Input
from kvtool.capture.loading import Loaded
from kvtool.capture.request import Request


def model_manifest(loaded: Loaded) -> dict[str, Any]:
    """Name, architecture, revision and weight digest of the model."""
    text = loaded.model.config.get_text_config()
    source = loaded.source
    return {
        "name": source.name,
        "architecture": type(loaded.model).__name__,
        "model_type": text.model_type,
        "revision": source.revision,
        "weight_digest": source.weight_digest,
        "weight_format": "gguf" if source.gguf or source.digest else "safetensors",
        "hidden_size": getattr(text, "hidden_size", None),
        "layers": getattr(text, "num_hidden_layers", None),
        "parameters": sum(parameter.numel() for parameter in loaded.model.parameters()),
    }


def capture_manifest(request: Request, loaded: Loaded, argv: list[str] | None) -> dict[str, Any]:
    """How the run was made: settings, backend, dtypes, versions, machine. The trace adds `stored_dtype`."""
    return {
        "tool": "kvtool capture",
        "mode": "teacher-forcing" if request.text_file is not None else "generation",
        "run_dtype": str(loaded.dtype).removeprefix("torch."),
        "attention": implementation(loaded.model),
        "queries": str(request.query_selection),
        "layers": request.layers or "all",
        "chunk": request.chunk,
        "generation": generation_settings(request),
        "seed": request.seed,
        "gradients": request.gradients,
        "device": "cpu",
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "argv": argv,
        "versions": versions(),
    }


def generation_settings(request: Request) -> dict[str, Any] | None:
    """How tokens were picked, or None under teacher forcing."""
    if request.text_file is not None:
        return None
    return {
        "decoding": "sampled" if request.sampled else "greedy",
        "max_new_tokens": request.new_tokens,
        "temperature": request.temperature if request.sampled else None,
        "top_k": request.top_k,
        "top_p": request.top_p,
        "chat": request.chat,
    }


def sequence_attributes(request: Request, item: Input) -> dict[str, Any]:
    """Attributes of one sequence. The trace adds lengths and the SHA-256 of the prompt's tokens."""
    attributes: dict[str, Any] = {
        "id": item.name,
        "mode": "generation" if item.new_tokens else "teacher-forcing",
        "generation": generation_settings(request),
        "seed": request.seed if request.sampled else None,
    }
    return {name: value for name, value in attributes.items() if value is not None}


def versions() -> dict[str, str]:
    """Versions of everything that decides the numbers."""
    found = {"python": platform.python_version()}
    for package in ("kvtool", "torch", "transformers", "tokenizers", "safetensors", "gguf", "numpy", "zarr"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
