"""KNorm: keep the keys of small norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvtool.layer import Geometry
from kvtool.policies.parameters import check_at_least
from kvtool.policies.policy import Policy
from kvtool.view import View


@dataclass(frozen=True)
class KNorm(Policy):
    """Keeps keys of small L2 norm, which tend to receive much attention. Looks at no query at all.

    Paper: A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression, 2406.11430.
    Deviations: none. Cost: O(Hk·N·D).

    Attributes:
        skip_layers: this many first layers keep everything; the paper's examples use 2, kvpress 0.
    """

    skip_layers: int = 0

    def __post_init__(self) -> None:
        check_at_least(self, 0, "skip_layers")

    def skips(self, geometry: Geometry) -> bool:
        return geometry.layer < self.skip_layers

    def score(self, state: Any, view: View) -> Tensor:
        """[Hk, N], minus the norm."""
        norms: Tensor = torch.linalg.vector_norm(view.keys, dim=-1)
        return -norms
