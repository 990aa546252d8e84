"""One capture from request to published, checked trace."""

from __future__ import annotations

from kvtool.capture.dry_run import estimate_of, within_memory
from kvtool.capture.layers import chosen_layers, say_gaps
from kvtool.capture.loading import Loaded
from kvtool.capture.outcome import Outcome
from kvtool.capture.packages import require
from kvtool.capture.prepare import Notes, Progress, dtype_name, prepare
from kvtool.capture.probe import probe
from kvtool.capture.quiet import quiet, threads
from kvtool.capture.request import Request
from kvtool.capture.sequences import write_sequences
from kvtool.trace import Trace, open_trace
from kvtool.trace.recompute import Recomputed, accuracy_error, recompute


def run(
    request: Request, *, progress: Progress | None = None, notes: Notes | None = None, argv: list[str] | None = None
) -> Outcome:
    """Capture what `request` says.

    Args:
        progress: called with (stage, tokens done, tokens in all or None).
        notes: called with one sentence about anything the user should know.
        argv: command line, for the manifest.

    Raises:
        KvtoolError: see docs/capture.md; nothing is published then.
    """
    request.check()
    require("transformers")
    progress, notes = progress or (lambda stage, done, total: None), notes or (lambda text: None)
    with quiet(), threads(request.threads):
        progress("loading", 0, None)
        ready = prepare(request, notes)
        if request.max_memory is not None:
            within_memory(request, estimate_of(request, ready))
        loaded = Loaded(ready.load_model(notes), ready.tokenizer, ready.source, ready.dtype)
        progress("probing", 0, None)
        probed = chosen_layers(request, probe(loaded.model))
        say_gaps(request, probed, notes)
        results: list[Recomputed] = []

        def check(trace: Trace) -> None:
            """A trace that disagrees with the model is never published, and an older one stays."""
            results.extend(recompute(trace, progress=lambda done, total, what: progress("checking", done, total)))
            fault = accuracy_error(trace, results)
            if fault is not None:
                raise fault

        sequences = write_sequences(request, ready, loaded, probed, progress, argv, check)
    trace = open_trace(request.output or "")
    return Outcome(
        path=trace.path,
        digest=trace.digest,
        disk_bytes=trace.total_bytes,
        layers=sorted(probed),
        sequences=sequences,
        error=max((result.error or 0.0 for result in results), default=0.0),
        bound=max(result.bound for result in results),
        run_dtype=str(trace.manifest["capture"]["run_dtype"]),
        stored_dtype=dtype_name(trace.stored_dtype),
    )
