"""Tangents: attention over one set of tokens as a function of the query, and its derivative at a centre."""

from dataclasses import replace

from torch import Tensor

from kvtool.kernels.device import door
from kvtool.kernels.tangent import reference
from kvtool.kernels.tangent.reference import Tangent, attention_weights

__all__ = ["Tangent", "attend", "attention_weights", "tangent_at"]

attend = door("tangent", reference.attend)
_tangent_at = door("tangent", reference.tangent_at)


def tangent_at(
    centre: Tensor,
    keys: Tensor,
    directions: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
) -> Tangent:
    """Attention over one set, linearised: see `kvtool.kernels.tangent.reference.tangent_at`."""
    found: Tangent = _tangent_at(centre, keys, directions, scale=scale, softcap=softcap, sink_logits=sink_logits)
    if found.keys is keys:
        return found
    return replace(found, keys=keys, directions=directions)  # a card has its own copies
