"""Goals: what is measured, what it is compared with, and what would be good enough."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

SHAPE = "10 policies x 5 ratios, 512 queries, 4 query heads a KV head, d = 128"


@dataclass(frozen=True)
class Goal:
    """One line of the bench.

    Attributes:
        goal: the number to reach, None where a line is only reported.
        at_most: whether the measured number should be at most `goal` (a cost) or at least (a speed-up).
        against: what it is compared with; the code of the comparison is in this package.
        floor: what arithmetic or memory alone would cost, in the same unit; None where no floor is known.
        unit: `ratio`, `seconds` or `share`.
    """

    name: str
    goal: float | None
    at_most: bool
    against: str
    floor: float | None = None
    unit: str = "ratio"


@dataclass(frozen=True)
class Measured:
    """What was found for one goal.

    Attributes:
        ratio: the median over rounds, None where it could not be measured.
        spread: (least, most) of the rounds.
        runs: how many rounds.
        reason: why there is no number.
        detail: CPU seconds of the parts and what else explains the number.
    """

    ratio: float | None = None
    spread: tuple[float, float] | None = None
    runs: int = 0
    reason: str | None = None
    detail: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def without(cls, reason: str) -> Measured:
        """Not measured, and why."""
        return cls(reason=reason)

    def met(self, goal: Goal) -> bool | None:
        """Whether the goal is reached; None where there is no number or no goal."""
        if self.ratio is None or goal.goal is None:
            return None
        return self.ratio <= goal.goal if goal.at_most else self.ratio >= goal.goal


def entry(goal: Goal, found: Measured) -> dict[str, Any]:
    """The line of the JSON document."""
    if found.ratio is not None and not math.isfinite(found.ratio):
        raise AssertionError(f"{goal.name} measured {found.ratio}")
    return {
        "name": goal.name,
        "ratio": found.ratio,
        "goal": goal.goal,
        "at_most": goal.at_most,
        "met": found.met(goal),
        "against": goal.against,
        "floor": goal.floor,
        "unit": goal.unit,
        "spread": None if found.spread is None else list(found.spread),
        "runs": found.runs,
        "reason": found.reason,
        "detail": found.detail,
    }


_DENSE = "one dense SDPA pass of the same queries, whose outputs are given"

_SOLVING = "torch.linalg.solve for every token; 4 heads of a group, 32,768 tokens, d = 128"
_PRODUCTS = "two bare products of the same shapes"

GOALS: tuple[Goal, ...] = (
    Goal("output_errors_8k", 3.8, True, f"{_DENSE}; {SHAPE}, 8,192 tokens", 3.0),
    Goal("output_errors_8k_layer", None, True, f"{_DENSE}; with layer_error"),
    Goal("output_errors_8k_kl", None, True, f"{_DENSE}; with predicted_kl"),
    Goal("output_errors_32k", 4.5, True, f"{_DENSE}; {SHAPE}, 32,768 tokens", 3.0),
    Goal("against_masked_sdpa", 15.0, False, "masked SDPA, one pass for each of the 50 cells, 8,192 tokens"),
    Goal("against_gathered_sdpa", 2.5, False, "SDPA over gathered keys and values, for each of the 50 cells, 8,192"),
    Goal("against_gathered_sdpa_20_ratios", 7.0, False, "the same with 20 ratios: 200 cells"),
    Goal("leverage_against_solving", 4.0, False, f"{_SOLVING}, float32 on both sides"),
    Goal("leverage_against_two_gemms", 1.3, True, f"{_PRODUCTS}, float32", 1.0),
    Goal("leverage_against_solving_float64", None, False, f"{_SOLVING}, float64 on both sides, as policies ask for"),
    Goal("leverage_against_two_gemms_float64", None, True, f"{_PRODUCTS}, float64", 1.0),
    Goal(
        "greedy_against_refactorising",
        25.0,
        False,
        "a Cholesky factor and a solve for all tokens at every pick, float64, the same 400 picks of 4,096, d = 128",
    ),
    Goal(
        "exhaustive_seconds", 1.0, True, "1 second of CPU: all 2^20 subsets of 20 tokens, 64 queries", None, "seconds"
    ),
    Goal("exhaustive_against_loop", 50.0, False, "a Python loop, one subset at a time, timed on 2,000 of them"),
    Goal(
        "decode_against_steps",
        3.0,
        False,
        "SDPA over the cache step by step; 8,192 steps, an event every 128, 1,024 tokens kept, d = 128, one cell",
    ),
    Goal("decode_50_cells", 4.5, False, "the same loop for each of 50 cells, timed on one of them"),
    Goal("head_read", 1.3, True, "a numpy memory map of the same bytes, copied; 16,384 tokens, d = 128, float16", 1.0),
    Goal(
        "replay_overhead",
        0.20,
        True,
        "all CPU seconds of `kvtool replay`, imports included: the share outside the four operations and Policy.score; "
        "2,048 + 512 tokens, 30 layers, 12 policies x 5 ratios",
        0.0,
        "share",
    ),
    Goal("workers", 1.7, False, "`kvtool replay --workers 1` by wall clock, on two idle cores", 2.0),
    Goal("kvpress", 5.0, False, "kvpress 0.5.5 in score mode, 5 presses x 5 ratios, measuring the same errors"),
)
