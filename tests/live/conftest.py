"""The tiny models of the capture tests, and their traces."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtool.capture import capture
from kvtool.trace import Trace

_spec = importlib.util.spec_from_file_location(
    "tiny_models", Path(__file__).resolve().parents[1] / "capture" / "conftest.py"
)
assert _spec is not None
assert _spec.loader is not None
_models = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_models)
tiny, folder = _models.tiny, _models.folder

TEXT = "Sphinx of black quartz, judge my vow. The five boxing wizards jump quickly; pack my box with jugs. " * 3


@pytest.fixture(scope="session")
def traced(tmp_path_factory: pytest.TempPathFactory, folder: Callable[[str], Path]) -> Callable[..., Trace]:
    """Function of (name, options of capture) -> a trace of the tiny model, 60 + 13 tokens by default."""
    torch.set_num_threads(1)

    @functools.cache
    def made(name: str, **options: Any) -> Trace:
        place = tmp_path_factory.mktemp("traces")
        (place / "text.txt").write_text(TEXT)
        options = {"prompt_tokens": 60, "eval_tokens": 13, **options}
        return capture(folder(name), place / f"{name}.zarr", text_file=place / "text.txt", **options)

    return made
