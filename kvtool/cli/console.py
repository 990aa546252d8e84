"""What the commands share of the terminal: the answer on stdout, everything else on stderr."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn

from kvtool.errors import KvtoolError

Step = Callable[[int, int | None, str], None]  # done, total, what


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # rich would exit 1, which means a finding here


def answer(*parts: Any) -> None:
    """Print the answer. Without a terminal lines are as wide as COLUMNS says, or 160, never cut to 80."""
    console = _Console(width=None if sys.stdout.isatty() else _columns() or 160, highlight=False)
    for part in parts:
        console.print(part)


def terminal_width() -> int | None:
    """Characters of a line where stdout is a terminal or COLUMNS says, else None."""
    return Console().width if sys.stdout.isatty() else _columns()


def _columns() -> int | None:
    """The environment's COLUMNS, None where it is no width."""
    text = os.environ.get("COLUMNS", "")
    return int(text) if text.isdecimal() and int(text) >= 20 else None


def json_answer(document: dict[str, Any]) -> None:
    """Print one JSON document; NaN is a programming error, not a value."""
    json.dump(document, sys.stdout, ensure_ascii=False, allow_nan=False, indent=1)
    sys.stdout.write("\n")


def hint(kind: str, text: str) -> None:
    """A line on stderr: `warning: …`, `note: …` or `next: …`."""
    print(f"{kind}: {text}", file=sys.stderr)


@contextlib.contextmanager
def progress_on_terminal(title: str, unit: str | None = None) -> Iterator[Step]:
    """A progress bar on stderr where that is a terminal; elsewhere the yielded function does nothing.

    Args:
        unit: of the work, such as `tokens`, to show a rate.
    """
    if not sys.stderr.isatty():
        yield lambda done, total, what: None
        return
    columns: list[ProgressColumn] = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()]
    if unit is not None:
        columns.append(TextColumn("{task.fields[rate]}"))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None, rate="")

        def step(done: int, total: int | None, what: str) -> None:
            speed = bar.tasks[0].speed
            rate = f"{speed:.0f} {unit}/s" if unit and speed and total and what == "capturing" else ""
            bar.update(task, completed=done, total=total, description=f"{title}: {what}", rate=rate)

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
