"""Recompute: attention output from the stored arrays, in float64, against the output that the model itself gave."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from kvtool.errors import KvtoolError
from kvtool.kernels.retained_attention.reference import attention
from kvtool.layer import Layer
from kvtool.trace.layout import dtype_name
from kvtool.trace.reader import Trace


@dataclass(frozen=True)
class Recomputed:
    """One layer of one sequence.

    Attributes:
        error: relative Frobenius error over all heads and sampled steps; None where no output was stored.
        bound: what `error` may be.
        steps: sampled steps.
    """

    sequence: int
    layer: int
    error: float | None
    bound: float
    steps: int

    @property
    def ok(self) -> bool:
        """Whether the arrays give the model's output; an absent sample is no fault."""
        return self.error is None or self.error <= self.bound


def error_bound(run_dtype: str, stored_dtype: str) -> float:
    """The relative error that rounding alone may cause.

    float32 stored as float32: 1e-5. float16 on either side: 2e-3. bfloat16 on either side: 1e-2.
    """
    if "bfloat16" in (run_dtype, stored_dtype):
        return 1e-2
    if "float16" in (run_dtype, stored_dtype):
        return 2e-3
    return 1e-5


def dtypes(trace: Trace) -> tuple[str, str]:
    """Run dtype and stored dtype; a trace that does not say what it ran in ran in what it stores."""
    stored = dtype_name(trace.stored_dtype)
    return str(trace.manifest.get("capture", {}).get("run_dtype") or stored), stored


def relative_error(layer: Layer) -> tuple[float, int] | None:
    """Relative Frobenius error of the recomputed output, and its steps; None where no output is stored."""
    if not layer.has("output_sample"):
        return None
    layer = layer.with_dtype(torch.float64)
    expected = layer.loaders["output_sample"]().to(torch.float64)  # [H, n, Dv]
    count = expected.shape[1]
    if not count:
        return None
    geometry, steps = layer.geometry, layer.query_steps[-count:]
    sinks = geometry.sink_logits
    output = attention(
        layer.queries[:, -count:],
        layer.keys,
        layer.values,
        steps=steps,
        rows=torch.arange(layer.tokens),
        first_visible=geometry.first_visible(steps),
        scale=geometry.scale,
        softcap=geometry.softcap,
        sink_logits=None if sinks is None else sinks.to(torch.float64),
    )
    norm = float(expected.norm())
    difference = float((output - expected).norm())
    return (difference / norm if norm else difference), count


def recompute(trace: Trace, progress: Callable[[int, int, str], None] | None = None) -> Iterator[Recomputed]:
    """Check every layer of every sequence. NaN anywhere counts as an infinite error."""
    bound = error_bound(*dtypes(trace))
    total, done = sum(len(sequence.layer_ids) for sequence in trace.sequences), 0
    for sequence in trace.sequences:
        for layer in sequence.layer_ids:
            if progress is not None:
                progress(done, total, f"sequence {sequence.index} layer {layer}")
            found = relative_error(sequence.layer(layer))
            error = None if found is None else found[0]
            yield Recomputed(
                sequence=sequence.index,
                layer=layer,
                error=float("inf") if error is not None and error != error else error,
                bound=bound,
                steps=0 if found is None else found[1],
            )
            done += 1


def accuracy_error(trace: Trace, results: list[Recomputed]) -> KvtoolError | None:
    """One sentence about the worst layer beyond its bound, None where there is none."""
    wrong = [result for result in results if not result.ok]
    if not wrong:
        return None
    worst = max(wrong, key=lambda result: result.error or 0.0)
    run, stored = dtypes(trace)
    return KvtoolError(
        "trace-inaccurate",
        f"attention recomputed from the trace is off by {worst.error:.3g} in sequence {worst.sequence}, "
        f"layer {worst.layer} (bound {worst.bound:g} for a {run} run stored as {stored}; {len(wrong)} beyond it)",
        "scale, softcap, sink logits, window or mask are not what the model used"
        if run == "float32"
        else "an eager run in 16 bits rounds its logits: run with --model-dtype float32, else scale, softcap, sink "
        "logits, window or mask are not what the model used",
    )
