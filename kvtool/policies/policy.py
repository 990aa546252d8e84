"""Policy: the base class of everything that decides which tokens stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from kvtool.errors import KvtoolError
from kvtool.layer import Geometry
from kvtool.policies.objective import Objective
from kvtool.policies.query_statistics import QueryStatistics
from kvtool.view import View


@dataclass(frozen=True)
class Protection:
    """Tokens that cannot be evicted: rows 0..sinks-1 of the sequence and the newest `window` rows."""

    sinks: int = 0
    window: int = 0

    def __post_init__(self) -> None:
        if self.sinks < 0 or self.window < 0:
            raise ValueError(f"protection cannot be negative: {self.sinks} sinks, window {self.window}")

    def union(self, other: Protection) -> Protection:
        return Protection(max(self.sinks, other.sinks), max(self.window, other.window))


@dataclass(frozen=True)
class Policy:
    """A frozen dataclass whose fields are the policy's parameters.

    Subclasses write `score`; stateful ones also `start` and `observe`. Keep no state on the
    policy: it is a value of its own, so that sequences cannot leak into each other.

    Class attributes:
        oracle: reads the future through `view.future`; printed as such.
        nested: the set kept at a smaller budget is part of the set kept at a larger one, because
            one ranking decides all budgets. False where `protection` depends on the budget.
        keeps_all: never evicts, whatever the budget (the control).
        positions: `original` where kept tokens and later queries keep their true rotary positions, `cache` where
            the cache counts its own: live tokens are 0, 1, … by row, the query's own token the last. A property
            where it depends on the parameters.
        needs: what a trace must hold, of `prompt-queries` (all queries before the event),
            `recent-queries` (those of the last steps), `rotation`, `future-rotation`,
            `output-projection`. A property where it depends on the parameters.
    """

    oracle: ClassVar[bool] = False
    nested: ClassVar[bool] = True
    keeps_all: ClassVar[bool] = False
    positions: ClassVar[str] = "original"
    needs: ClassVar[tuple[str, ...]] = ()

    def protection(self, budget: int) -> Protection:
        """What the policy itself protects at a budget of `budget` tokens per KV head; joins by union."""
        return Protection()

    def start(self, geometry: Geometry) -> Any:
        """The state before the first token of a sequence."""
        return None

    def observe(self, state: Any, view: View) -> Any:
        """The state after the steps view.start..view.step-1. Called once per run of steps between events."""
        return state

    def score(self, state: Any, view: View) -> Tensor:
        """[Hk, N] in view.dtype or wider, one score per candidate in `view.tokens`; higher is kept."""
        raise KvtoolError("policy-broken", f"{type(self).__name__} defines no score")

    def queries_back(self, step: int) -> int:
        """How many of the queries just before `step` are read; derived from `needs` unless overridden."""
        return step if "prompt-queries" in self.needs else 1 if "recent-queries" in self.needs else 0

    @property
    def calibration_trace(self) -> str | None:
        """Path of a trace of other texts whose gradients the policy reads through `view.information`, or None."""
        return None

    def skips(self, geometry: Geometry) -> bool:
        """Whether this layer is left whole, whatever the budget."""
        return self.keeps_all

    def diagnose(self, state: Any, view: View) -> dict[str, Tensor]:
        """Numbers [H] that tell how the policy worked at this event, logged with the head's metrics."""
        return {}

    def refine(self, scores: Tensor, view: View, allowed: list[int], shield: Protection) -> Tensor:
        """[Hk, N]: the scores at one budget, for policies that choose tokens together. `nested` is False then
        unless the sets nest all the same.

        Args:
            scores: what `score` gave; not to be changed.
            allowed: tokens that each KV head keeps.
            shield: what is protected, the run's own included.
        """
        return scores

    def query_statistics(self, view: View) -> QueryStatistics | None:
        """The queries that the policy itself expects, None where it expects none. The covariance is diagonal
        where the policy reads no more of it."""
        return None

    def objective(self, view: View) -> Objective | None:
        """What the policy means to maximise over the candidates, None where it has no such objective."""
        return None
