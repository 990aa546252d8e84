"""Numbers: what a trace's arrays must hold whoever sealed them, tokens from 0 up and finite floats."""

from __future__ import annotations

import torch

from kvtool.errors import KvtoolError
from kvtool.trace.layout import LAYER_ARRAYS
from kvtool.trace.reader import Sequence, Trace

_FLOATS = tuple(name for name, (kind, _) in LAYER_ARRAYS.items() if not kind.startswith("int"))


def numbers_fault(trace: Trace) -> KvtoolError | None:
    """The first number of a trace that cannot be right, None where all can; reads every array once.

    Returns:
        `trace-unsafe` for tokens and steps, `not-finite` for floats, naming sequence, layer and array.
    """
    try:
        for sequence in trace.sequences:
            _check(sequence)
    except KvtoolError as error:
        if error.code not in ("trace-unsafe", "not-finite"):
            raise
        return error
    return None


def _check(sequence: Sequence) -> None:
    _ = sequence.tokens, sequence.gradient_steps
    for layer in sequence.layer_ids:
        sequence.query_steps(layer)
        for name in (*_FLOATS, "output_projection"):
            if sequence.has_array(name, layer) and not bool(torch.isfinite(sequence.array(name, layer)).all()):
                raise KvtoolError(
                    "not-finite",
                    f"{name} of sequence {sequence.index}, layer {layer} hold NaN or infinity",
                    "no replay of this trace can be trusted; capture again",
                )
