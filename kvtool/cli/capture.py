"""`kvtool capture`: run a model once and store what its attention saw."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

_INPUT, _RUN, _STORE, _LIMITS = "Input (exactly one)", "The run", "What is stored", "Limits and safety"


def command(
    model: str = typer.Argument(
        ..., metavar="MODEL", help="Local folder, GGUF file, smollm2 (packaged), or a Hugging Face id with --online."
    ),
    output: Path | None = typer.Option(None, "-o", "--output", help="The trace to write, such as run.zarr."),
    prompt: str | None = typer.Option(None, "--prompt", help="One prompt.", rich_help_panel=_INPUT),
    prompt_file: Path | None = typer.Option(None, help="One prompt from a text file.", rich_help_panel=_INPUT),
    prompts: Path | None = typer.Option(
        None, help='JSON lines, one sequence each: {"prompt": "...", "id": "..."}.', rich_help_panel=_INPUT
    ),
    text_file: list[Path] | None = typer.Option(
        None,
        help="Teacher forcing on a text; needs the two options below. Repeatable: one sequence each.",
        rich_help_panel=_INPUT,
    ),
    prompt_tokens: int | None = typer.Option(
        None, min=1, help="With --text-file: the first N tokens are the prompt.", rich_help_panel=_INPUT
    ),
    eval_tokens: int | None = typer.Option(
        None, min=1, help="With --text-file: the next M tokens are the evaluated steps.", rich_help_panel=_INPUT
    ),
    chat: bool = typer.Option(
        False, "--chat", help="Put prompts into the model's chat template.", rich_help_panel=_RUN
    ),
    max_new_tokens: int | None = typer.Option(
        None, min=1, help="Tokens to generate (64); end-of-text stops earlier.", rich_help_panel=_RUN
    ),
    temperature: float | None = typer.Option(
        None, min=0.0, help="Sample at this temperature; without it (or at 0) decoding is greedy.", rich_help_panel=_RUN
    ),
    top_k: int | None = typer.Option(None, min=1, help="Sample from the k likeliest tokens.", rich_help_panel=_RUN),
    top_p: float | None = typer.Option(
        None, min=0.0, max=1.0, help="Sample from the smallest set with this probability.", rich_help_panel=_RUN
    ),
    seed: int = typer.Option(0, min=0, help="Seed of sampling and of gradients' draws.", rich_help_panel=_RUN),
    chunk: int | None = typer.Option(None, min=1, help="Feed at most N tokens per forward.", rich_help_panel=_RUN),
    model_dtype: str | None = typer.Option(
        None,
        help="float32, bfloat16 or float16 for the run; the checkpoint's own, float32 for GGUF.",
        rich_help_panel=_RUN,
    ),
    threads: int | None = typer.Option(None, min=1, help="CPU threads.", rich_help_panel=_RUN),
    layers: str | None = typer.Option(None, help="Layers to store, such as 0,4-7; all.", rich_help_panel=_STORE),
    queries: str = typer.Option("all", help="Queries to store: all, decode or last:N.", rich_help_panel=_STORE),
    dtype: str | None = typer.Option(None, help="Stored dtype; the run's.", rich_help_panel=_STORE),
    output_projection: bool = typer.Option(
        True, "--output-projection/--no-output-projection", help="Store the output projection.", rich_help_panel=_STORE
    ),
    gradients: int | None = typer.Option(
        None, min=1, help="Store gradients of S random draws: what predicted_kl needs.", rich_help_panel=_STORE
    ),
    gradients_at: str | None = typer.Option(
        None, help="Steps with gradients: continuation (the default), prompt or all.", rich_help_panel=_STORE
    ),
    gradient_targets: str | None = typer.Option(
        None, help="Draw only behind steps LO:HI, half open; step t predicts row t+1.", rich_help_panel=_STORE
    ),
    gradient_block: int | None = typer.Option(
        None, min=1, help="Cut gradients at every N steps; one block.", rich_help_panel=_STORE
    ),
    gradient_probe: str | None = typer.Option(
        None, help="What is drawn: signs (the default) or next tokens (tokens).", rich_help_panel=_STORE
    ),
    dry_run: bool = typer.Option(False, "--dry-run", help="Say tokens, disk and memory; run nothing."),
    max_memory: str | None = typer.Option(
        None, help="Refuse to start above this estimate, such as 12GB.", rich_help_panel=_LIMITS
    ),
    online: bool = typer.Option(False, "--online", help="Allow downloads from Hugging Face.", rich_help_panel=_LIMITS),
    force: bool = typer.Option(False, "--force", help="Replace an existing trace.", rich_help_panel=_LIMITS),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document."),
) -> None:
    """Capture a run of MODEL: queries, keys and values of every attention layer.

    Generation (--prompt, --prompt-file, --prompts) or teacher forcing on real text (--text-file).
    """
    from kvtool.capture.request import Request

    request = Request(
        model=model,
        output=output,
        prompt=prompt,
        prompt_file=prompt_file,
        prompts=prompts,
        text_file=tuple(text_file) if text_file else None,
        prompt_tokens=prompt_tokens,
        eval_tokens=eval_tokens,
        chat=chat,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        chunk=chunk,
        model_dtype=model_dtype,
        threads=threads,
        layers=layers,
        queries=queries,
        dtype=dtype,
        output_projection=output_projection,
        gradients=gradients,
        gradients_at=gradients_at,
        gradient_targets=gradient_targets,
        gradient_block=gradient_block,
        gradient_probe=gradient_probe,
        max_memory=max_memory,
        online=online,
        force=force,
    )
    request.check(output_needed=not dry_run)
    from kvtool.capture.dry_run import dry_run as estimate
    from kvtool.capture.run import run
    from kvtool.cli.console import hint, json_answer, progress_on_terminal
    from kvtool.replay.serving import first_replay
    from kvtool.trace import open_trace

    def note(text: str) -> None:
        hint("note", text)

    if dry_run:
        plan = estimate(request, notes=note)
        json_answer(plan.document()) if as_json else typer.echo(plan.text())
        return
    with progress_on_terminal("capture", unit="tokens") as step:
        outcome = run(request, progress=lambda stage, done, total: step(done, total, stage), notes=note, argv=sys.argv)
    json_answer(outcome.document()) if as_json else typer.echo(outcome.text())
    hint("checked", outcome.check_line())
    hint("next", first_replay(open_trace(outcome.path)))
