"""`kvtool diff`: what two results, two policies or two traces do not share, and whether B is worse."""

from __future__ import annotations

from typing import Annotated

import typer

from kvtool.errors import KvtoolError


def command(
    a: Annotated[str, typer.Argument(metavar="A", help="A result folder, or folder::policy@ratio@schedule.")],
    b: Annotated[str, typer.Argument(metavar="B", help="What is held against it, written the same way.")],
    traces: Annotated[bool, typer.Option("--traces", help="A and B are traces of the same tokens.")] = False,
    trace: Annotated[
        str | None, typer.Option(help="The trace that was replayed, to tell tokens. Default: where it was then.")
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
    online: Annotated[bool, typer.Option("--online", help="Traces may lie at addresses, such as s3://….")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown for a pull request instead.")] = False,
) -> None:
    """Compare two results: what differs, in which layers, heads and tokens. Exits 1 if B is worse."""
    if as_json and markdown:
        raise KvtoolError("usage", "--json and --markdown are two answers", "choose one")
    if traces:
        given = {"--trace": trace, "--by": by, "--metric": metric, "--relative": relative, "--absolute": absolute}
        wrong = [name for name, value in {**given, "--sequences": sequences, "--markdown": markdown}.items() if value]
        if wrong:
            raise KvtoolError("usage", f"{', '.join(wrong)} is for results, --traces compares traces", "leave it out")
        from kvtool.cli.diff_traces import traces_answer

        if traces_answer(a, b, as_json, online=online):
            raise typer.Exit(1)
        return
    if tokens < 0:
        raise KvtoolError("usage", f"--tokens {tokens} is below 0", "--tokens 0 names none")
    from kvtool.cli.console import answer, hint, json_answer, progress_on_terminal, terminal_width
    from kvtool.compare import diff
    from kvtool.report.diff_next import next_command
    from kvtool.report.markdown_diff import markdown_diff
    from kvtool.report.terminal_diff import diff_parts
    from kvtool.trace import open_trace

    places = [word for word in (by, "sequence" if sequences else None) if word]
    with progress_on_terminal("diff") as progress:
        found = diff(
            a,
            b,
            trace=None if trace is None else open_trace(trace, online=online),
            by=places,
            metrics=metric or (),
            relative=relative,
            absolute=absolute,
            tokens=tokens,
            progress=progress,
        )
    document = found.document()
    if as_json:
        json_answer(document)
    elif markdown:
        typer.echo(markdown_diff(document), nl=False)
    else:
        answer(*diff_parts(document, terminal_width()))
    for warning in document["warnings"]:
        hint("warning", warning)
    hint("next", next_command(document))
    if found.worse:
        raise typer.Exit(1)
