"""Which layers are stored, and what is said about them beforehand."""

from __future__ import annotations

from collections.abc import Callable

from kvtool.capture.probe import Probed
from kvtool.capture.request import Request
from kvtool.errors import KvtoolError
from kvtool.words import parse_ids, spans


def chosen_layers(request: Request, probed: dict[int, Probed]) -> dict[int, Probed]:
    """The layers that `--layers` names, all without it.

    Raises:
        KvtoolError: code `usage`: ids that are no attention layers, or a layer without its donor.
    """
    wanted = parse_ids(request.layers, "--layers")
    if wanted is None:
        return probed
    wrong = [layer for layer in wanted if layer not in probed]
    if wrong:
        raise KvtoolError(
            "usage",
            f"the model has no attention in layer {spans(wrong)}",
            f"its attention layers are {spans(sorted(probed))}",
        )
    chosen = {layer: probed[layer] for layer in wanted}
    for layer, entry in chosen.items():
        donor = entry.geometry.kv_source
        if donor is not None and donor not in chosen:
            raise KvtoolError(
                "usage",
                f"layer {layer} reads the keys and values of layer {donor}, which --layers leaves out",
                f"add {donor} to --layers",
            )
    return chosen


def say_gaps(request: Request, probed: dict[int, Probed], notes: Callable[[str], None]) -> None:
    """Note what the trace will lack: output projections and rotations."""
    gated = [layer for layer, entry in probed.items() if entry.projection is None]
    if gated and request.output_projection:
        notes(
            f"layers {spans(gated)} store no output projection: something stands between their attention output and it"
        )
    unknown = [layer for layer, entry in probed.items() if entry.geometry.rotation is None]
    if unknown:
        notes(f"the rotary embedding of layers {spans(unknown)} was not recognised: policies that need it will refuse")
