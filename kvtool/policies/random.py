"""Random: the second control."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from kvtool.policies.parameters import check_at_least, check_choices
from kvtool.policies.policy import Policy
from kvtool.view import View


@dataclass(frozen=True)
class Random(Policy):
    """Scores every token by an independent uniform number. What does not beat it has learnt nothing.

    Paper: none. Deviations: the stream comes from (seed, prompt, layer, head, event), where
    kvpress repeats one mask in every layer and event. Cost: O(Hk·e).

    Attributes:
        seed: of the stream.
        mode: `per_head` draws for every KV head, `shared` once for all heads of a layer.
    """

    seed: int = 0
    mode: Literal["per_head", "shared"] = "per_head"

    def __post_init__(self) -> None:
        check_choices(self)
        check_at_least(self, 0, "seed")

    def score(self, state: Any, view: View) -> Tensor:
        """[Hk, N] float64. Drawn per row, so that a token's number does not depend on its rivals."""
        heads = view.geometry.kv_heads
        drawn = [view.stream(self.seed, h if self.mode == "per_head" else 0).random(view.step) for h in range(heads)]
        return torch.stack([torch.from_numpy(d) for d in drawn]).gather(1, view.tokens)
