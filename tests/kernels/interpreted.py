"""Run a function of a file beside this one under Triton's interpreter, in a process of its own.

The interpreter is chosen when `triton` is imported, so the tests' own process, which compiles the same kernels for
cards, cannot use it. In the other process every `torch.empty` is filled with NaN: what a kernel forgets shows.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MARK = "answer: "


def interpreted(file: str, function: str, *arguments: Any) -> Any:
    """What `function(*arguments)` of `tests/kernels/<file>.py` returns, as JSON carries it."""
    paths = [str(ROOT), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    told = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-W", "ignore", "-c", f"import interpreted; interpreted.run({file!r}, {function!r})"]
    done = subprocess.run(
        command, input=json.dumps(arguments), env={**os.environ, **told}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith(MARK))[len(MARK) :])


def run(file: str, function: str) -> None:
    """In the other process."""
    import importlib

    import torch

    torch.set_num_threads(1)
    plain = torch.empty

    def poisoned(*shape: Any, **how: Any) -> torch.Tensor:
        found = plain(*shape, **how)
        return found.fill_(torch.nan) if found.is_floating_point() else found

    torch.empty = poisoned  # type: ignore[assignment]
    torch.manual_seed(0)
    print(MARK + json.dumps(getattr(importlib.import_module(file), function)(*json.load(sys.stdin))))
