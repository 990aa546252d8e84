"""`kvtool replay`: replay policies on a trace and print which keeps attention's output best."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Annotated

import typer

from kvtool.cli import schedules
from kvtool.errors import KvtoolError


def command(
    trace: Annotated[str, typer.Argument(help="A trace of kvtool capture or import, or with --online its address.")],
    policy: Annotated[
        list[str] | None,
        typer.Option("-p", "--policy", help="name:key=value,… or file.py:Class; repeatable; 'all' is every built-in."),
    ] = None,
    ratio: Annotated[
        list[str] | None,
        typer.Option("-r", "--ratio", help="Share of tokens evicted, e.g. 0.5,0.9. Default 0.5,0.75,0.9."),
    ] = None,
    budget: Annotated[
        list[str] | None,
        typer.Option("-b", "--budget", help="Tokens kept per KV head, instead of a ratio, e.g. 128,256."),
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
    deadline_ms: schedules.Deadline = None,
    telemetry: Annotated[
        bool, typer.Option("--telemetry", help="Also measure what every event costs on this machine.")
    ] = False,
    bin_steps: Annotated[
        int | None, typer.Option("--bin", help="Steps per bin of errors over time. Default: at most 32 bins.")
    ] = None,
    ages: Annotated[
        bool, typer.Option("--ages", help="Also print how old what is kept is, and what survives.")
    ] = False,
    ages_by_layer: Annotated[bool, typer.Option("--ages-by-layer", help="The same layer by layer too.")] = False,
    sinks: Annotated[int, typer.Option(help="First tokens that no policy may evict.")] = 4,
    window: Annotated[int, typer.Option(help="Newest tokens that no policy may evict.")] = 32,
    layers: Annotated[str | None, typer.Option(help="Layers to replay, e.g. 0,4-7. Default: all captured.")] = None,
    sequences: Annotated[str | None, typer.Option(help="Sequences to replay, e.g. 0,2-3. Default: all.")] = None,
    evaluate: Annotated[
        str, typer.Option(help="live: queries see what is left and all new tokens; pool: the candidates only.")
    ] = "live",
    precision: Annotated[str, typer.Option(help="float32 or float64 arithmetic.")] = "float32",
    kl_window: Annotated[
        list[int] | None,
        typer.Option("--kl-window", help="Steps in a further window of predicted_kl, besides 1 and 32; repeatable."),
    ] = None,
    token_shares: Annotated[
        bool, typer.Option("--token-shares", help="Also tell predicted_kl apart by evicted token, in a second pass.")
    ] = False,
    decompose: Annotated[
        bool, typer.Option("--decompose", help="Tell apart selection, linearisation and dropped competition.")
    ] = False,
    center: Annotated[
        str, typer.Option(help="Where to linearise if a policy expects no queries: rope_mean, prompt, past or future.")
    ] = "rope_mean",
    horizon: Annotated[int, typer.Option(help="Most queries to decompose.")] = 512,
    samples: Annotated[int, typer.Option(help="Sub-caches per KV head for exact search; 0 leaves it out.")] = 64,
    pool: Annotated[int, typer.Option(help="Tokens of a sub-cache.")] = 16,
    keep: Annotated[int, typer.Option(help="Tokens of a sub-cache that are kept.")] = 8,
    metric: Annotated[
        list[str] | None,
        typer.Option(
            "--metric", help="A metric besides kvtool's own: a plug-in's name:key=value,… or file.py:Class; repeatable."
        ),
    ] = None,
    device: Annotated[
        str, typer.Option(help="cpu; cuda: Triton kernels on a card; auto: a card where there is one.")
    ] = "auto",
    threads: Annotated[int | None, typer.Option(help="CPU threads. Default: torch's choice.")] = None,
    workers: Annotated[
        int | None, typer.Option(help="Processes that share the layers, one thread each. Default: this one alone.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help="Address of a Dask scheduler whose workers share the layers; needs -o.")
    ] = None,
    online: Annotated[bool, typer.Option("--online", help="The trace may lie at an address, such as s3://….")] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Folder for Parquet tables; resumes there.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of the table.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a finished result in the output folder.")] = False,
) -> None:
    """Replay eviction policies on a trace. The controls full and random always run."""
    from kvtool.cli.console import answer, hint, json_answer, progress_on_terminal, terminal_width, use_threads
    from kvtool.cli.numbers import number_list
    from kvtool.replay import replay
    from kvtool.report.terminal import replay_table
    from kvtool.report.terminal_ages import ages_tables
    from kvtool.report.terminal_decomposition import decomposition_tables
    from kvtool.report.terminal_landmarks import landmark_tables
    from kvtool.words import parse_ids

    if threads not in (None, 1) and (workers is not None or cluster is not None):
        raise KvtoolError("usage", f"--threads {threads}: a worker has one thread", "leave --threads out")
    use_threads(threads)
    gc.freeze()  # what was imported stays until the end: no collection need look at it again
    with progress_on_terminal("replay") as progress:
        result = replay(
            trace,
            policies=policy or ["all"],
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
            deadline_ms=deadline_ms,
            telemetry=telemetry,
            bin_steps=bin_steps,
            sinks=sinks,
            window=window,
            layers=parse_ids(layers, "--layers"),
            sequences=parse_ids(sequences, "--sequences"),
            evaluate=evaluate,
            precision=precision,
            kl_windows=kl_window or (),
            token_shares=token_shares,
            decompose=decompose,
            center=center,
            horizon=horizon,
            samples=samples,
            pool=pool,
            keep=keep,
            metrics=metric or (),
            device=device,
            workers=workers,
            cluster=cluster,
            online=online,
            output=output,
            force=force,
            progress=progress,
            note=lambda text: hint("note", text),
        )
    if as_json:
        json_answer(result.document())
    else:
        answer(*replay_table(result, terminal_width()))
        if ages or ages_by_layer:
            answer(*ages_tables(result, terminal_width(), by_layer=ages_by_layer))
        answer(*landmark_tables(result))
        if decompose:
            answer(*decomposition_tables(result, terminal_width()))
    for warning in result.warnings:
        hint("warning", warning)
    if output is None and not as_json:
        hint("note", "tables per layer and head are kept with -o results/, or printed with --json")
        if token_shares:
            hint("note", "shares by evicted token are in those tables only")
    if (result.manifest["capture"] or {}).get("source") == "synth":  # no model wrote this trace
        hint("next", f"kvtool ablate {trace} says which choice of a policy matters here")
    else:
        hint("next", f"kvtool live MODEL {trace} … --calibrate evicts in the real model and says how far to trust this")
