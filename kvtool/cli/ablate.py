"""`kvtool ablate`: change a policy one choice at a time, and print which choice matters."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    trace: Annotated[str, typer.Argument(help="A trace written by kvtool capture or kvtool import.")],
    reference: Annotated[
        str, typer.Option("--reference", help="The policy whose choices are changed: name:key=value,…")
    ] = "jacap",
    axes: Annotated[
        str | None, typer.Option(help="Axes to study, e.g. temperature,leverage, in all pairs. Default: all.")
    ] = None,
    interactions: Annotated[
        bool, typer.Option("--interactions/--no-interactions", help="Try changes two at a time as well.")
    ] = True,
    metric: Annotated[
        str | None,
        typer.Option(help="predicted_kl, mean_layer_error or mean_output_error. Default: the first there is."),
    ] = None,
    ratio: Annotated[list[str] | None, typer.Option("-r", "--ratio", help="Share of tokens evicted.")] = None,
    sinks: Annotated[int, typer.Option(help="First tokens that no policy may evict.")] = 4,
    window: Annotated[int, typer.Option(help="Newest tokens that no policy may evict.")] = 32,
    layers: Annotated[str | None, typer.Option(help="Layers to replay, e.g. 0,4-7. Default: all captured.")] = None,
    sequences: Annotated[str | None, typer.Option(help="Sequences to replay, e.g. 0,2-3. Default: all.")] = None,
    evaluate: Annotated[
        str, typer.Option(help="live: queries see what is left and all new tokens; pool: the candidates only.")
    ] = "live",
    precision: Annotated[str, typer.Option(help="float32 or float64 arithmetic.")] = "float32",
    threads: Annotated[
        int | None, typer.Option(help="CPU threads. Default: 1 for short prompts, else torch's choice.")
    ] = None,
    online: Annotated[bool, typer.Option("--online", help="The trace may lie at an address, such as s3://….")] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Folder for Parquet tables; resumes there.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of the tables.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a finished result in the output folder.")] = False,
) -> None:
    """Which of a capacity policy's choices matters, and which only together? Default ratio 0.75."""
    from kvtool.ablate import ablate
    from kvtool.cli.console import answer, hint, json_answer, progress_on_terminal, terminal_width, use_threads
    from kvtool.cli.numbers import number_list
    from kvtool.report.ablate_summary import best_variant
    from kvtool.report.terminal_ablate import ablate_tables
    from kvtool.words import parse_ids

    use_threads(threads)
    with progress_on_terminal("ablate") as progress:
        result = ablate(
            trace,
            reference=reference,
            axes=axes,
            interactions=interactions,
            metric=metric,
            ratios=number_list(ratio) or ["0.75"],
            sinks=sinks,
            window=window,
            layers=parse_ids(layers, "--layers"),
            sequences=parse_ids(sequences, "--sequences"),
            evaluate=evaluate,
            precision=precision,
            threads=threads,
            online=online,
            output=output,
            force=force,
            progress=progress,
            notes=lambda text: hint("note", text),
        )
    if as_json:
        json_answer(result.document())
    else:
        answer(*ablate_tables(result, terminal_width()))
    for warning in result.warnings:
        hint("warning", warning)
    best = best_variant(result)
    if best is None:
        hint("next", f"kvtool replay {trace} -p {reference} shows layers and heads")
    else:
        hint("next", f"kvtool ablate {trace} --reference {best} asks the same around the best variant")
