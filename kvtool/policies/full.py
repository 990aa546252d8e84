"""Full: the control that never evicts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvtool.policies.policy import Policy
from kvtool.view import View


@dataclass(frozen=True)
class Full(Policy):
    """Keeps every token whatever the budget, so every error it shows is the tool's own. Always run as the control.

    Paper: none. Deviations: none. Cost: none.
    """

    keeps_all: ClassVar[bool] = True

    def score(self, state: Any, view: View) -> Tensor:
        """[Hk, N], all equal."""
        return torch.zeros(view.tokens.shape, dtype=view.dtype)
