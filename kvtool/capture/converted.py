"""A safetensors copy of the packaged model, made once: reading its GGUF file takes 15 seconds, the copy one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from kvtool.capture.loading import load_config, load_model, load_tokenizer
from kvtool.capture.source import Source


def cache_folder() -> Path:
    """$KVTOOL_CACHE, else ~/.cache/kvtool."""
    return Path(os.environ.get("KVTOOL_CACHE") or Path("~/.cache/kvtool").expanduser())


def converted(source: Source, notes: Callable[[str], None]) -> Source:
    """The copy of a GGUF `source`, made now if it is not there.

    It is keyed by the digest of the file and the versions that read it, and appears by one rename.
    Where the cache cannot be written, the GGUF file itself is used and a note says why.
    """
    import transformers

    name = f"{source.name}-{source.weight_digest[:16]}-transformers-{transformers.__version__}"
    folder = cache_folder() / name
    copy = replace(source, folder=folder, gguf=None, digest=source.weight_digest)
    if folder.is_dir():
        return copy
    partial = folder.with_name(f"{name}.partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True, exist_ok=True)
        notes(f"unpacking {source.name} once into {folder} (540 MB)")
        load_tokenizer(source).save_pretrained(partial)
        load_model(source, load_config(source), torch.float32).save_pretrained(partial)
        partial.rename(folder)
    except OSError as error:
        if folder.is_dir():  # another process was faster
            return copy
        notes(f"{cache_folder()} cannot be written ({error.strerror or error}): the GGUF file is read every time")
        return source
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return copy
