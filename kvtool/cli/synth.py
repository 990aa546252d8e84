"""`kvtool synth`: a trace whose structure and right answer are known."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvtool.errors import KvtoolError


def command(
    name: Annotated[
        str,
        typer.Argument(
            help="needle, delayed-constraint, competing-evidence, phase-shift, saturated-token, heavy-sink or "
            "redundant-values."
        ),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="TRACE", help="Where the trace goes: run.zarr.")],
    prompt: Annotated[int, typer.Option(help="Rows of the prompt.")] = 512,
    steps: Annotated[int, typer.Option(help="Rows behind the prompt.")] = 128,
    layers: Annotated[int, typer.Option(help="Layers, alike but for their noise.")] = 2,
    heads: Annotated[int, typer.Option(help="Query heads.")] = 4,
    kv_heads: Annotated[int, typer.Option("--kv-heads", help="KV heads.")] = 2,
    dim: Annotated[int, typer.Option(help="Channels of queries, keys and values.")] = 32,
    seed: Annotated[int, typer.Option(help="Of all random numbers.")] = 0,
    dtype: Annotated[str, typer.Option(help="Stored as float32, float16 or bfloat16.")] = "float32",
    depths: Annotated[
        list[str] | None,
        typer.Option("--depths", help="Of the needle, as shares of the prompt: 0.1,0.5. Default 0.5."),
    ] = None,
    lengths: Annotated[
        list[str] | None,
        typer.Option("--lengths", help="Prompts of the needle: 256,512; a sequence for each depth and length."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a trace that is already there.")] = False,
) -> None:
    """Write a trace of a known failure case: what must be kept is known, and so is who loses it."""
    from kvtool.cli.console import answer, hint, json_answer
    from kvtool.cli.numbers import number_list
    from kvtool.synth import synth
    from kvtool.words import size

    trace = synth(
        name,
        output,
        prompt=prompt,
        steps=steps,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        seed=seed,
        dtype=dtype,
        depths=[_depth(text) for text in number_list(depths)] if depths else None,
        lengths=number_list(lengths, whole=True, what="a length") if lengths else None,
        force=force,
    )
    answers = [(sequence.synthetic or {})["answer"] for sequence in trace.sequences]
    if as_json:
        json_answer(
            {
                "schema": "kvtool.synth/1",
                "path": str(output),
                "digest": trace.digest,
                "disk_bytes": trace.total_bytes,
                "sequences": [
                    {
                        "id": s.id,
                        "tokens": s.length,
                        "prompt_tokens": s.prompt_length,
                        "landmarks": s.landmarks,
                        "synthetic": s.synthetic,
                    }
                    for s in trace.sequences
                ],
            }
        )
    else:
        count = len(trace.sequences)
        answer(f"{output}: {name}, {count} sequence{'s' * (count != 1)}, {size(trace.total_bytes)}")
        answer(f"the right answer: {answers[0]}" + (" (of the first sequence)" if count > 1 else ""))
    hint("next", f"kvtool replay {output} -p all -r 0.75")


def _depth(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise KvtoolError("usage", f"--depths {text}: a depth is a number from 0 to 1") from None
