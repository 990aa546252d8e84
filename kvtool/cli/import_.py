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
    from kvtool.cli.console import answer, hint
    from kvtool.trace import open_trace
    from kvtool.trace.import_dump import import_dump
    from kvtool.trace.recompute import accuracy_error, recompute
    from kvtool.words import size

    import_dump(dump, output, force=force)
    trace = open_trace(output)
    tokens = sum(sequence.length for sequence in trace.sequences)
    answer(
        f"{output}: {len(trace.sequences)} sequences, {tokens} tokens, {len(trace.layer_ids)} layers, "
        f"{size(trace.total_bytes)}"
    )
    results = list(recompute(trace))
    wrong = accuracy_error(trace, results)
    if wrong is not None:
        hint("warning", f"{wrong.message}: {wrong.hint}")
    elif any(row.error is None for row in results):
        hint("note", "layers without output_sample could not be checked against the engine's own output")
    hint("next", f"kvtool inspect {output} --verify" if wrong else f"kvtool replay {output} -p snapkv -r 0.5")
