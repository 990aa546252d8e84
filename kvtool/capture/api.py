"""The Python door: `kvtool.capture.capture`, with the words of the command line."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtool.capture.request import Request
from kvtool.errors import KvtoolError
from kvtool.registry import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtool.trace import Trace


def capture(
    model: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    progress: Callable[[str, int, int | None], None] | None = None,
    notes: Callable[[str], None] | None = None,
    **options: Any,
) -> Trace:
    """Run a model once and store what its attention saw. Prints nothing.

    Args:
        model: folder, GGUF file, `smollm2`, or a Hugging Face id with `online=True`.
        output: the trace to write.
        progress: called with (stage, tokens done, tokens in all or None).
        notes: called with one sentence about anything worth knowing.
        options: the fields of kvtool.capture.request.Request, named like the command's options:
            one of `prompt`, `prompt_file`, `prompts`, `text_file` (a path or several), and so on;
            `layers` may be a list of ids.

    Raises:
        KvtoolError: as the command does.
    """
    known = [field.name for field in fields(Request) if field.name not in ("model", "output")]
    for name in options:
        if name not in known:
            raise KvtoolError("usage", f"capture has no option {name!r}", did_you_mean(name, known))
    from kvtool.capture.run import run
    from kvtool.trace import open_trace

    for name in ("prompt_file", "prompts"):
        if options.get(name) is not None:
            options[name] = Path(options[name])
    texts = options.get("text_file")
    if texts is not None:
        options["text_file"] = tuple(Path(t) for t in ([texts] if isinstance(texts, str | os.PathLike) else texts))
    if isinstance(options.get("layers"), list | tuple | range):
        options["layers"] = ",".join(map(str, options["layers"]))
    request = Request(model=os.fspath(model), output=Path(output), **options)
    return open_trace(run(request, progress=progress, notes=notes).path)
