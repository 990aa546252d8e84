"""What a model folder may hold: no code of its own, no pickled weights, no adapter on top."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvtool.errors import KvtoolError

_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def _mentions(value: Any, key: str) -> bool:
    """Whether a JSON value holds `key` anywhere."""
    if isinstance(value, dict):
        return key in value or any(_mentions(part, key) for part in value.values())
    return isinstance(value, list) and any(_mentions(part, key) for part in value)


def indexed_weights(folder: Path) -> list[Path]:
    """The weight files that loading will read: those of the index where there is one, else every .safetensors.

    Raises:
        KvtoolError: `model-unsafe` for an index that names anything but safetensors, `model-load` for a bad one.
    """
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        whole = folder / "model.safetensors"
        return [whole] if whole.is_file() else sorted(folder.glob("*.safetensors"))
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        paths = [folder / name for name in sorted(names)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise KvtoolError("model-load", f"{index} is not readable as an index of weights") from None
    for path in paths:
        if path.suffix != ".safetensors" or path.parent != folder:
            raise KvtoolError(
                "model-unsafe", f"{index} leads to {path.name}, which is no safetensors file beside it", "convert it"
            )
    return paths


def check_folder(folder: Path, *, weights: bool = True) -> None:
    """Refuse a model folder that would run code, or has no weights that can be read safely.

    Args:
        weights: whether the weights must be there already.

    Raises:
        KvtoolError: `model-unsafe`, `model-load`, naming the file.
    """
    if not (folder / "config.json").is_file():
        raise KvtoolError(
            "model-load", f"{folder} holds no config.json, so it is not a model", "give the model's folder"
        )
    for path in sorted(folder.glob("*.json")):
        if path.name.endswith("index.json") or path.name in ("tokenizer.json", "vocab.json"):
            continue
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise KvtoolError("model-load", f"{path} is not readable as JSON") from None
        if _mentions(value, "auto_map"):
            raise KvtoolError(
                "model-unsafe",
                f"{path} asks for the model's own Python code (auto_map), which kvtool never runs",
                "use a version of the model whose architecture transformers itself has",
            )
    if (folder / "adapter_config.json").is_file():
        raise KvtoolError("model-load", f"{folder} is an adapter on another model", "merge it into a full model first")
    if not weights or indexed_weights(folder):
        return
    pickled = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLED)
    if pickled:
        raise KvtoolError(
            "model-unsafe",
            f"the weights in {folder} are pickled ({pickled[0]}), and unpickling runs code",
            "convert them to safetensors",
        )
    raise KvtoolError("model-load", f"{folder} holds no .safetensors weights", "give a GGUF file by its own path")
