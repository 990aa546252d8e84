"""`kvtool metrics [NAME]`: what is measured, in which columns, and what other packages add."""

from __future__ import annotations

from typing import Annotated

import typer


def command(
    name: Annotated[str | None, typer.Argument(help="A metric, to see its idea, columns and parameters.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """List the metrics, or explain one."""
    from kvtool.cli.console import answer, hint, json_answer
    from kvtool.metrics import describe_metrics
    from kvtool.plugins import unreadable
    from kvtool.report.terminal_lists import metric_page, metrics_table

    described = describe_metrics([name] if name else None)
    if as_json:
        json_answer({"schema": "kvtool.metrics/1", "metrics": described})
    elif name:
        answer(*metric_page(described[0]))
    else:
        answer(metrics_table(described))
    for metric in described:
        if metric["fault"]:
            hint("warning", metric["fault"])
    for sentence in unreadable():
        hint("warning", sentence)
    further = name and not described[0]["from"].startswith("kvtool ")
    hint("next", f"kvtool replay run.zarr -p snapkv -r 0.5{f' --metric {name}' if further else ''}")
