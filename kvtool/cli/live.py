"""`kvtool live`: really evict, measure what the model then says, hold it against the prediction."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvtool.cli import schedules

_WHAT, _RUN, _MORE = "What is evicted", "The run", "What is measured besides"


def command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="The model of the trace, as for kvtool capture.")],
    trace: Annotated[str, typer.Argument(help="A trace written by kvtool capture.")],
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "-p", "--policy", help="As for kvtool replay; repeatable; 'all' is every built-in.", rich_help_panel=_WHAT
        ),
    ] = None,
    ratio: Annotated[
        list[str] | None,
        typer.Option("-r", "--ratio", help="Share of tokens evicted. Default 0.5,0.75,0.9.", rich_help_panel=_WHAT),
    ] = None,
    budget: Annotated[
        list[str] | None,
        typer.Option("-b", "--budget", help="Tokens kept per KV head, instead.", rich_help_panel=_WHAT),
    ] = None,
    evict_at: schedules.EvictAt = None,
    every: schedules.Every = None,
    start: schedules.From = None,
    high_water: schedules.HighWater = None,
    prefill_block: schedules.PrefillBlock = None,
    prompt_end: schedules.PromptEnd = False,
    evict_order: schedules.EvictOrder = "before",
    delay: schedules.Delay = 0,
    granularity: schedules.Granularity = "token",
    schedule: schedules.Spelled = None,
    prefix: schedules.Prefix = 0,
    decide: Annotated[
        str,
        typer.Option(
            help="trace: decisions are those of replay; run: of what the evicted model computes itself.",
            rich_help_panel=_WHAT,
        ),
    ] = "trace",
    sinks: Annotated[int, typer.Option(help="First tokens never evicted.", rich_help_panel=_WHAT)] = 4,
    window: Annotated[int, typer.Option(help="Newest tokens never evicted.", rich_help_panel=_WHAT)] = 32,
    layers: Annotated[
        str | None, typer.Option(help="Layers that evict, e.g. 0,4-7. Default: all captured.", rich_help_panel=_WHAT)
    ] = None,
    sequences: Annotated[
        str | None, typer.Option(help="Sequences to run, e.g. 0,2-3. Default: all.", rich_help_panel=_WHAT)
    ] = None,
    calibrate: Annotated[
        bool,
        typer.Option("--calibrate", help="Replay beside it; predicted against measured.", rich_help_panel=_MORE),
    ] = False,
    kl_window: Annotated[
        list[int] | None,
        typer.Option(
            "--kl-window", help="With --calibrate: a further window of predicted_kl; repeatable.", rich_help_panel=_MORE
        ),
    ] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(
            "--metric",
            help="With --calibrate: a metric besides kvtool's own, as for kvtool replay; repeatable.",
            rich_help_panel=_MORE,
        ),
    ] = None,
    layer_errors: Annotated[
        bool, typer.Option("--layer-errors", help="Attention error of every layer.", rich_help_panel=_MORE)
    ] = False,
    generate: Annotated[
        int, typer.Option(min=0, help="Tokens of the model's own continuation per cell.", rich_help_panel=_MORE)
    ] = 0,
    answer: Annotated[
        list[str] | None,
        typer.Option(
            help="A text, or rows LO:HI, whose likelihood is measured; one, or one per sequence.",
            rich_help_panel=_MORE,
        ),
    ] = None,
    precision: Annotated[
        str, typer.Option(help="float32 or float64 arithmetic of decisions.", rich_help_panel=_RUN)
    ] = "float32",
    model_dtype: Annotated[
        str | None, typer.Option(help="Of the run. Default: as captured.", rich_help_panel=_RUN)
    ] = None,
    other_weights: Annotated[
        bool,
        typer.Option(
            "--other-weights", help="Admit other weight files; keys must agree all the same.", rich_help_panel=_RUN
        ),
    ] = False,
    chunk: Annotated[
        int | None, typer.Option(min=1, help="Feed at most N tokens per forward.", rich_help_panel=_RUN)
    ] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads.", rich_help_panel=_RUN)] = None,
    online: Annotated[
        bool, typer.Option("--online", help="Allow downloads, and a trace at an address.", rich_help_panel=_RUN)
    ] = False,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Folder for Parquet tables.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of the table.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a finished result in the output folder.")] = False,
) -> None:
    """Run MODEL on the tokens of TRACE and evict from its cache what replay would: the closed loop.

    The controls full and random always run; full must leave the model's predictions as they are.
    """
    from kvtool.cli.console import answer as print_answer
    from kvtool.cli.console import hint, json_answer, progress_on_terminal, terminal_width, use_threads
    from kvtool.cli.numbers import number_list
    from kvtool.live import live
    from kvtool.report.terminal_live import live_tables
    from kvtool.words import parse_ids

    use_threads(threads)
    with progress_on_terminal("live") as progress:
        result = live(
            model,
            trace,
            policy or ["all"],
            ratios=number_list(ratio),
            budgets=number_list(budget, whole=True),
            schedules=schedules.schedule_words(
                evict_at=evict_at,
                every=every,
                start=start,
                high_water=high_water,
                prefill_block=prefill_block,
                prompt_end=prompt_end,
                evict_order=evict_order,
                delay=delay,
                granularity=granularity,
                spelled=schedule,
            ),
            prefix=prefix,
            decide=decide,
            sinks=sinks,
            window=window,
            layers=parse_ids(layers, "--layers"),
            sequences=parse_ids(sequences, "--sequences"),
            precision=precision,
            kl_windows=kl_window or (),
            metrics=metric or (),
            calibrate=calibrate,
            layer_errors=layer_errors,
            generate=generate,
            answer=answer or (),
            other_weights=other_weights,
            model_dtype=model_dtype,
            online=online,
            chunk=chunk,
            output=output,
            force=force,
            progress=progress,
            notes=lambda text: hint("note", text),
        )
    if as_json:
        json_answer(result.document())
    else:
        print_answer(*live_tables(result, terminal_width()))
    for warning in result.warnings:
        hint("warning", warning)
    if calibrate:
        hint("next", f"kvtool replay {trace} … needs no model, and this is how far to trust it")
    else:
        hint("next", f"kvtool live {model} {trace} … --calibrate holds the replay's predictions against this")
