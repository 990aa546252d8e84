"""`kvtool import`: a trace from a safetensors dump of any engine."""

from __future__ import annotations

from pathlib import Path

import typer


def command(
    dump: Path = typer.Argument(..., metavar="DUMP", help="A .safetensors dump; docs/import.md says what it holds."),
    output: Path = typer.Option(..., "-o", "--output", metavar="TRACE", help="Where the trace goes: run.zarr."),
    force: bool = typer.Option(False, "--force", help="Replace a trace that is already there."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document."),
) -> None:
    """Turn queries, keys and values dumped by any engine into a trace."""
    from kvtool.cli.console import answer, hint, json_answer
    from kvtool.replay.serving import first_replay
    from kvtool.trace import open_trace
    from kvtool.trace.import_dump import import_dump
    from kvtool.trace.recompute import accuracy_error, recompute
    from kvtool.words import size

    import_dump(dump, output, force=force)
    trace = open_trace(output)
    tokens = sum(sequence.length for sequence in trace.sequences)
    results = list(recompute(trace))
    wrong = accuracy_error(trace, results)
    if as_json:
        errors = [row.error for row in results if row.error is not None]
        json_answer(
            {
                "schema": "kvtool.import/1",
                "path": str(output),
                "digest": trace.digest,
                "disk_bytes": trace.total_bytes,
                "layers": trace.layer_ids,
                "sequences": [{"tokens": s.length, "prompt_tokens": s.prompt_length} for s in trace.sequences],
                "recomputed_error": max(errors, default=None),
                "recomputed_bound": max((row.bound for row in results), default=None),
            }
        )
    else:
        count = len(trace.sequences)
        answer(
            f"{output}: {count} sequence{'s' * (count != 1)}, {tokens} tokens, {len(trace.layer_ids)} layers, "
            f"{size(trace.total_bytes)}"
        )
    if wrong is not None:
        hint("warning", f"{wrong.message}: {wrong.hint}")
    elif any(row.error is None for row in results):
        hint("note", "layers without output_sample could not be checked against the engine's own output")
    hint("next", f"kvtool inspect {output} --verify" if wrong else first_replay(trace))
