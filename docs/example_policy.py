"""A policy of your own in one file: run it with `-p docs/example_policy.py:NewestAndLoudest`."""

from dataclasses import dataclass

from torch import Tensor

from kvtool.policies import Policy
from kvtool.view import View


@dataclass(frozen=True)
class NewestAndLoudest(Policy):
    """Keep tokens with large values, and let a token's weight fade with its age.

    Not from a paper: an example. Cost: one norm per value.
    """

    half_life: float = 256.0

    def __post_init__(self) -> None:
        if self.half_life <= 0:
            raise ValueError("half_life is a positive number of tokens")

    def score(self, state: None, view: View) -> Tensor:
        age = view.step - view.tokens  # [Hk, N]
        return view.values.norm(dim=-1) * 0.5 ** (age / self.half_life)  # [Hk, N]
