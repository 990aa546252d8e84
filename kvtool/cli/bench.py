"""`kvtool bench`: how fast kvtool is on this machine, held against plain torch and against floors."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def command(
    trace: Annotated[
        Path | None, typer.Argument(help="A trace: its layers are measured as well, and it is what is replayed.")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", help="Goals by name, e.g. head_read,workers. Default: all."),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, or cuda for the kernels on this machine's card.")] = "cpu",
    budget: Annotated[float, typer.Option(help="Seconds in all; what would take longer is left out.")] = 540.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of the table.")] = False,
) -> None:
    """Measure kvtool against plain torch, as ratios. The exit code is 0 whether or not goals are met."""
    from kvtool.bench import bench
    from kvtool.cli.console import answer, hint, json_answer, progress_on_terminal, terminal_width
    from kvtool.report.terminal_bench import bench_views, unmet

    with progress_on_terminal("bench") as progress:

        def say(done: int, total: int, what: str) -> None:
            progress(done, total, what)
            if not sys.stderr.isatty():  # a run of minutes should not look stuck in a log
                hint("bench", f"{done + 1} of {total}: {what}")

        names = [name.strip() for word in only or [] for name in word.split(",")]
        result = bench(trace, only=names, device=device, budget=budget, progress=say)
    if as_json:
        json_answer(result.document())
    else:
        answer(*bench_views(result, terminal_width(), everything=not only))
    missed = unmet(result)
    if missed:
        hint("note", f"short of its goal: {', '.join(missed)}; the exit code is 0 all the same")
    hint("next", "kvtool bench --only NAME measures one line again; docs/bench.md explains them")
