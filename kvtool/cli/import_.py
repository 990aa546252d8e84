"""`kvtool import`: a trace from a safetensors dump of any engine."""

from __future__ import annotations

from pathlib import Path

import typer


def command(
    dump: Path = typer.Argument(..., metavar="DUMP", help="A .safetensors dump; docs/import.md says what it holds."),
    output: Path = typer.Option(..., "-o", "--output", metavar="TRACE", help="Where the trace goes: run.zarr."),
    force: bool = typer.Option(False, "--force", help="Replace a trace that is already there."),
) -> None:
    """Turn queries, keys and values dumped by any engine into a trace."""
    from kvtool.trace.dump import import_dump

    import_dump(dump, output, force=force)
