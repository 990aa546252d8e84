"""Run a function of a file beside this one under Triton's interpreter, in a process of its own.

The interpreter is chosen when `triton` is imported, so the tests' own process, which compiles the same kernels for
cards, cannot use it. In the other process every `torch.empty` is filled with NaN: what a kernel forgets shows. It is
started once and answers one line for every line, since imports take longer than most of its answers; when the tests'
process is gone it reads the end of its input and ends.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def interpreted(file: str, function: str, *arguments: Any) -> Any:
    """What `function(*arguments)` of `tests/kernels/<file>.py` returns, as JSON carries it."""
    process = _other()
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps([file, function, arguments]) + "\n")
    process.stdin.flush()
    line = process.stdout.readline()
    if not line:
        _other.cache_clear()
    assert line, f"the interpreter's process ended with {process.wait()} in {file}.{function}"
    kind, answer = json.loads(line)
    assert kind == "answer", answer
    return answer


@functools.cache
def _other() -> subprocess.Popen[str]:
    paths = [str(ROOT), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    told = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", "import interpreted; interpreted.serve()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **told},
        text=True,
    )


def serve() -> None:
    """In the other process: every line asks for a function, and gets its answer or its traceback."""
    import importlib

    import torch

    torch.set_num_threads(1)
    plain, answers = torch.empty, sys.stdout

    def poisoned(*shape: Any, **how: Any) -> torch.Tensor:
        found = plain(*shape, **how)
        return found.fill_(torch.nan) if found.is_floating_point() else found

    torch.empty = poisoned  # type: ignore[assignment]
    for line in sys.stdin:
        file, function, arguments = json.loads(line)
        torch.manual_seed(0)
        try:
            with contextlib.redirect_stdout(sys.stderr):  # what is printed meanwhile is no answer
                said = ["answer", getattr(importlib.import_module(file), function)(*arguments)]
        except Exception:
            said = ["error", traceback.format_exc()]
        print(json.dumps(said), file=answers, flush=True)
