"""Manifest: what someone else needs to produce the very same numbers."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import inspect
import json
import math
import platform
import sys
import weakref
from pathlib import Path
from typing import Any


def canonical_json(value: Any) -> str:
    """One spelling per value: sorted keys, no blanks, no NaN. Digests are taken of this."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def digest(value: Any) -> str:
    """SHA-256 of the canonical JSON of `value`."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def versions(*packages: str) -> dict[str, str | None]:
    """Installed versions of python, kvtool and `packages`; None where one is absent."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in ("kvtool", *packages):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def environment(*packages: str) -> dict[str, Any]:
    """Versions, platform and command line of this process."""
    import torch

    return {
        "versions": versions("torch", "numpy", *packages),
        "platform": f"{platform.system()}-{platform.machine()}",
        "threads": torch.get_num_threads(),
        "argv": list(sys.argv),
    }


_SOURCES: weakref.WeakKeyDictionary[type, str | None] = weakref.WeakKeyDictionary()


def source_digest(cls: type) -> str | None:
    """SHA-256 of the file that defines `cls`: two policies of one name may differ in their code. None where a package
    ships no such file (compiled, or inside an archive).

    It is of what the file held when it was first asked about, which is when the class was loaded: what the file
    holds later is not what runs.
    """
    if cls not in _SOURCES:
        try:
            file = inspect.getsourcefile(cls)
            _SOURCES[cls] = None if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()
        except (TypeError, OSError):
            _SOURCES[cls] = None
    return _SOURCES[cls]


def remember_source(cls: type, source: bytes) -> None:
    """`cls` was made by running `source`, the bytes of a file."""
    _SOURCES[cls] = hashlib.sha256(source).hexdigest()


def parameters(value: Any) -> dict[str, Any]:
    """Every field of a policy or metric dataclass, defaults included, as JSON can say them.

    Raises:
        TypeError: naming the field that JSON cannot say.
    """
    found = {}
    for field in (field for field in dataclasses.fields(value) if field.init):
        try:
            found[field.name] = _plain(getattr(value, field.name))
        except TypeError as error:
            raise TypeError(f"parameter {field.name} is {error}") from None
    return found


def _plain(value: Any) -> Any:
    """`value` as JSON can say it. Infinity is a word there; NaN would not even equal itself."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float) and not math.isnan(value):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _plain(one) for key, one in value.items()}
    what = "NaN" if isinstance(value, float) else f"of type {type(value).__name__}"
    raise TypeError(f"{what}, which no manifest can hold")
