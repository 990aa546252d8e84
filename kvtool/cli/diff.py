"""`kvtool diff`: what two results, two policies or two traces do not share, and whether B is worse."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    a: Annotated[str, typer.Argument(metavar="A", help="A result folder, or folder::policy@ratio@schedule.")],
    b: Annotated[str, typer.Argument(metavar="B", help="What is held against it, written the same way.")],
    traces: Annotated[bool, typer.Option("--traces", help="A and B are traces of the same tokens.")] = False,
    trace: Annotated[
        Path | None, typer.Option(help="The trace that was replayed, to tell tokens. Default: where it was then.")
    ] = None,
    by: Annotated[
        str | None, typer.Option(help="Tell apart by sequence, layer, kv_head, q_head or event, e.g. sequence,layer.")
    ] = None,
    metric: Annotated[
        list[str] | None, typer.Option("--metric", help="Compare and judge only this one; repeatable.")
    ] = None,
    relative: Annotated[
        list[str] | None,
        typer.Option("--relative", help="Allowed change as a share of A, [METRIC=]X; repeatable. Default 0.001."),
    ] = None,
    absolute: Annotated[
        list[str] | None,
        typer.Option("--absolute", help="Allowed change in the metric's unit, [METRIC=]X; repeatable. Default 1e-9."),
    ] = None,
    sequences: Annotated[bool, typer.Option("--sequences", help="Tell every sequence apart.")] = False,
    tokens: Annotated[int, typer.Option(help="Most tokens to name per sequence; 0 leaves them out.")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown for a pull request instead.")] = False,
) -> None:
    """Compare two results: what differs, in which layers, heads and tokens. Exits 1 if B is worse."""
