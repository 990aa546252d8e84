"""Manifest: what someone else needs to produce the very same numbers."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import inspect
import json
import platform
import sys
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


def source_digest(cls: type) -> str | None:
    """SHA-256 of the file that defines `cls`: two policies of one name may differ in their code. None where a package
    ships no such file (compiled, or inside an archive)."""
    try:
        file = inspect.getsourcefile(cls)
        return None if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except (TypeError, OSError):
        return None


def parameters(value: Any) -> dict[str, Any]:
    """Every field of a policy or metric dataclass, defaults included."""
    return {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
