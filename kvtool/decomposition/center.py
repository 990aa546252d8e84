"""Centre: around which query a head's attention is linearised, and how queries scatter about it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvtool.decomposition.settings import EXCLUDE, Decompose
from kvtool.layer import Layer
from kvtool.policies.query_statistics import (
    QueryStatistics,
    first_counted,
    mean_rotation,
    statistics_of,
    turned,
)
from kvtool.shapes import expect_shapes
from kvtool.view import View


@dataclass(frozen=True, eq=False)
class Centre:
    """One centre per query head of a layer.

    Attributes:
        mean: [H, D] float64.
        covariance: [H, D, D] float64, about the mean.
        source: `policy` for the policy's own, else what `--center` names.
    """

    mean: Tensor
    covariance: Tensor
    source: str

    @property
    def shape(self) -> str:
        """`diagonal` where queries are taken to scatter channel by channel, else `full`."""
        off = self.covariance - torch.diag_embed(self.covariance.diagonal(dim1=1, dim2=2))
        return "full" if bool(off.any()) else "diagonal"

    @classmethod
    def of_policy(cls, found: QueryStatistics, layer: Layer) -> Centre:
        """The policy's own statistics.

        Raises:
            KvtoolError: code `shape`.
        """
        heads, dim = layer.geometry.query_heads, layer.geometry.key_dim
        expect_shapes(mean=(found.mean, f"{heads} {dim}"), covariance=(found.covariance, f"{heads} {dim} {dim}"))
        return cls(found.mean.to(torch.float64), found.covariance.to(torch.float64), "policy")


def centre_of_layer(layer: Layer, step: int, steps: Tensor, asked: Decompose) -> Centre:
    """The centre for policies that expect no queries of their own.

    Args:
        layer: in float64.
        step: the event.
        steps: [F] the evaluated steps, read by `future` alone.

    Raises:
        KvtoolError: `trace-lacks` for queries or a rotation that the trace does not hold.
    """
    source = source_of(layer, asked)
    if source == "rope_mean":
        view = View.at(layer, step)
        past = statistics_of(view.unrotated_queries(first_counted(view, EXCLUDE), step))
        found = turned(past, mean_rotation(view, asked.horizon))
        return Centre(found.mean, found.covariance, source)
    if source == "future":
        queries = layer.queries[:, torch.searchsorted(layer.query_steps, steps)]
    else:
        stop = min(step, layer.prompt_length) if source == "prompt" else step
        queries = layer.queries[:, layer.query_rows(max(0, min(EXCLUDE, stop - 1)), stop)]
    found = statistics_of(queries)
    return Centre(found.mean, found.covariance, source)


def source_of(layer: Layer, asked: Decompose) -> str:
    """What `--center` means on this layer: without a rotation there is nothing to turn."""
    unturned = asked.center == "rope_mean" and layer.geometry.rotation == "none"
    return "prompt" if unturned else asked.center
