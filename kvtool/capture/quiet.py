"""Silence: transformers' progress bars, log lines and warnings do not belong into kvtool's stderr."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet() -> Iterator[None]:
    """While open, transformers and huggingface_hub log and warn nothing; their settings are put back."""
    import transformers
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def no_stderr() -> Iterator[None]:
    """While open, stderr goes nowhere: reading a GGUF file draws bars that have no switch.

    What matters arrives as an exception.
    """
    with contextlib.redirect_stderr(io.StringIO()):
        yield


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """While open, torch computes with `count` threads; None leaves it alone."""
    import torch

    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
