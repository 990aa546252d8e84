"""KNorm: keep the keys of small norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvtool.policies.policy import Policy
from kvtool.view import View


@dataclass(frozen=True)
class KNorm(Policy):
    """Keeps keys of small L2 norm, which tend to receive much attention. Looks at no query at all.

    Paper: A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression, 2406.11430.
    Deviations: every layer is compressed (as in kvpress), where the paper leaves the first two
    whole. Cost: O(Hk·N·D).
    """

    def score(self, state: Any, view: View) -> Tensor:
        """[Hk, N], minus the norm."""
        norms: Tensor = torch.linalg.vector_norm(view.keys, dim=-1)
        return -norms
