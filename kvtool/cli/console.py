"""What the commands share of the terminal: the answer on stdout, everything else on stderr."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kvtool.errors import KvtoolError

Step = Callable[[int, int, str], None]  # done, total, what


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # rich would exit 1, which means a finding here


def answer(*parts: Any) -> None:
    """Print the answer. Without a terminal lines are not cut to 80 columns."""
    console = _Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    for part in parts:
        console.print(part)


def json_answer(document: dict[str, Any]) -> None:
    """Print one JSON document; NaN is a programming error, not a value."""
    json.dump(document, sys.stdout, ensure_ascii=False, allow_nan=False, indent=1)
    sys.stdout.write("\n")


def hint(kind: str, text: str) -> None:
    """A line on stderr: `warning: …`, `note: …` or `next: …`."""
    print(f"{kind}: {text}", file=sys.stderr)


@contextlib.contextmanager
def progress_on_terminal(title: str) -> Iterator[Step | None]:
    """A progress bar on stderr where that is a terminal, else None."""
    if not sys.stderr.isatty():
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None)

        def step(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=f"{title} {what}")

        yield step


def use_threads(threads: int | None) -> None:
    """Limit torch to `threads` CPU threads.

    Raises:
        KvtoolError: code `usage` below 1.
    """
    if threads is None:
        return
    if threads < 1:
        raise KvtoolError("usage", f"--threads {threads} is below 1")
    import torch

    torch.set_num_threads(threads)
