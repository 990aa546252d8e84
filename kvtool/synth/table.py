"""The constructions by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from kvtool.errors import KvtoolError
from kvtool.synth.competing_evidence import competing_evidence
from kvtool.synth.delayed_constraint import delayed_constraint
from kvtool.synth.heavy_sink import heavy_sink
from kvtool.synth.needle import needle
from kvtool.synth.phase_shift import phase_shift
from kvtool.synth.redundant_values import redundant_values
from kvtool.synth.saturated_token import saturated_token
from kvtool.synth.scene import Scene, Size

CONSTRUCTIONS: dict[str, Callable[[Size], Scene]] = {
    "delayed-constraint": delayed_constraint,
    "competing-evidence": competing_evidence,
    "phase-shift": phase_shift,
    "saturated-token": saturated_token,
    "heavy-sink": heavy_sink,
    "redundant-values": redundant_values,
    "needle": needle,
}


def construction(name: str) -> Callable[[Size], Scene]:
    """The construction of that name.

    Raises:
        KvtoolError: code `usage`, listing the names and the nearest one.
    """
    if name not in CONSTRUCTIONS:
        near = difflib.get_close_matches(name, CONSTRUCTIONS, n=1, cutoff=0.4)
        meant = f"did you mean {near[0]}? " if near else ""
        raise KvtoolError("usage", f"there is no construction {name!r}", f"{meant}known: {', '.join(CONSTRUCTIONS)}")
    return CONSTRUCTIONS[name]
