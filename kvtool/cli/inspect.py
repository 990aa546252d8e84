"""`kvtool inspect`: what a trace holds, what it can serve, and whether every byte of it is sound."""

from __future__ import annotations

from typing import Any

import typer


def command(
    trace: str = typer.Argument(..., metavar="TRACE", help="A trace folder, such as run.zarr, or an address."),
    verify: bool = typer.Option(False, "--verify", help="Check every byte, then recompute attention from the arrays."),
    online: bool = typer.Option(False, "--online", help="The trace may lie at an address, such as s3://…."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document instead of tables."),
) -> None:
    """Show model, sequences, layers and sizes of a trace, and which policies it can serve."""
    from kvtool.cli import trace_tables as tables
    from kvtool.cli.console import answer, hint, json_answer
    from kvtool.replay.serving import serving
    from kvtool.trace import open_trace
    from kvtool.trace.summary import summary

    document: dict[str, Any] = {"schema": "kvtool.inspect/1"}
    checked = _check_bytes(trace, document, as_json, online) if verify else None
    opened = open_trace(trace, online=online)
    found = summary(opened)
    document.update(found)
    document["serving"] = [
        {"name": row.name, "kind": row.kind, "ok": row.ok, "reason": row.reason} for row in serving(opened)
    ]
    wrong = _check_numbers(opened, document) if verify else None
    document["warnings"] = []
    if as_json:
        json_answer(document)
    else:
        answer(tables.head_table(found), "", tables.sequence_table(found), "", tables.layer_table(found), "")
        if any(row["landmarks"] or row["synthetic"] for row in found["sequences"]):
            answer(tables.landmark_table(found), "")
        answer(tables.serving_table(document["serving"]))
        if checked is not None:
            answer("", f"bytes: all {checked} files are as written", "")
            answer(tables.recompute_table(document["verify"]["recompute"]))
    if wrong is not None:
        raise wrong
    hint("next", f"kvtool replay {trace} -p snapkv -r 0.5" if verify else f"kvtool inspect {trace} --verify")


def _check_bytes(trace: str, document: dict[str, Any], as_json: bool, online: bool) -> int:
    """Compare all bytes and return how many files that were; damage is printed whole, then raised."""
    from kvtool.cli import trace_tables as tables
    from kvtool.cli.console import answer, json_answer, progress_on_terminal
    from kvtool.trace.verify import damage_error, verify_bytes

    with progress_on_terminal("verify") as progress:
        report = verify_bytes(trace, progress, online=online)
    damage = [{"path": row.path, "what": row.what} for row in report.damage]
    document["verify"] = {"files": report.files, "bytes": report.total_bytes, "damage": damage}
    if damage:
        if as_json:
            json_answer({**document, "path": str(trace)})
        else:
            answer(tables.damage_table(damage))
        raise damage_error(trace, report)
    return report.files


def _check_numbers(opened: Any, document: dict[str, Any]) -> Exception | None:
    """Look at every number and recompute attention; the error to raise after the answer was printed, or None."""
    from kvtool.cli.console import progress_on_terminal
    from kvtool.trace.numbers import numbers_fault
    from kvtool.trace.recompute import accuracy_error, dtypes, recompute

    with progress_on_terminal("recompute") as progress:
        results = list(recompute(opened, progress))
    run, stored = dtypes(opened)
    document["verify"].update(
        run_dtype=run,
        stored_dtype=stored,
        recompute=[
            {
                "sequence": row.sequence,
                "layer": row.layer,
                "steps": row.steps,
                "error": None if row.error == float("inf") else row.error,
                "bound": row.bound,
                "ok": row.ok,
            }
            for row in results
        ],
    )
    return numbers_fault(opened) or accuracy_error(opened, results)
