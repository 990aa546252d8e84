"""What every test needs: few threads, no network, and the way to run the command line in this process."""

from __future__ import annotations

import contextlib
import os
import signal

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

torch.set_num_threads(1)

# A suite started in the background inherits an ignored Ctrl-C, and so would the processes that tests interrupt.
with contextlib.suppress(ValueError):
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _no_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are as wide as COLUMNS says; test runners set it."""
    monkeypatch.delenv("COLUMNS", raising=False)
