"""A policy with a parameter for every axis, so that designs can be tested whatever the built-in policies offer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from kvtool.policies import Policy
from kvtool.view import View


@dataclass(frozen=True)
class ManyChoices(Policy):
    """Scores by row; its parameters decide nothing but whether they are accepted."""

    tau: float = 10.0
    relevance: Literal["softmax", "exp_cosine", "exp_dot", "ones"] = "softmax"
    sensitivity: Literal["saturating", "none"] = "saturating"
    response: Literal["diagonal", "full", "none"] = "diagonal"
    competition: Literal["diagonal", "centred"] = "diagonal"
    directions: Literal["values", "outputs"] = "values"
    leverage: bool = True
    ridge: Literal["identity", "relative"] | float = "identity"
    statistics: str = "rope_mean"
    selector: Literal["one_shot", "two_pass", "greedy"] = "one_shot"
    blend: float = 1.0
    floor: Literal["history", "leave_one_out"] = "history"
    group: Literal["mean", "max"] = "mean"
    group_stage: Literal["score", "weight"] = "score"
    exclude_statistics: int = 4
    exclude_first: int = 0
    weight_eps: float = 0.0
    shift: Literal["max", "none"] = "max"

    def __post_init__(self) -> None:
        if self.sensitivity == "saturating" and self.relevance != "softmax":
            raise ValueError(f"sensitivity=saturating needs relevance=softmax, not {self.relevance}")
        if self.selector == "greedy" and not self.leverage:
            raise ValueError("selector=greedy needs leverage")

    def score(self, state: Any, view: View) -> Tensor:
        return view.tokens.to(torch.float64)
