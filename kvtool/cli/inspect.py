"""`kvtool inspect`: what a trace holds, what it can serve, and whether every byte of it is sound."""

from __future__ import annotations

from pathlib import Path

import typer


def command(
    trace: Path = typer.Argument(..., metavar="TRACE", help="A trace folder, such as run.zarr."),
    verify: bool = typer.Option(False, "--verify", help="Check every byte, then recompute attention from the arrays."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document instead of tables."),
) -> None:
    """Show model, sequences, layers and sizes of a trace, and which policies it can serve."""
    from kvtool.trace import open_trace

    open_trace(trace)
