"""The capacity family: leverage of what each token contributes to the output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from kvtool.errors import KvtoolError
from kvtool.kernels.leverage import Leverage, LeverageError, leverage_scores
from kvtool.policies.capacity_weights import Relevance, Response, Shift, logits_and_slope, relevance, response_variance
from kvtool.policies.group import reduce_group
from kvtool.policies.parameters import check_at_least, check_choices, check_positive
from kvtool.policies.policy import Policy, Protection
from kvtool.policies.query_statistics import QueryStatistics, StatisticsSource, expected_statistics
from kvtool.view import View


@dataclass(frozen=True)
class Capacity(Policy):
    """Base of `jacap` and `capkv`, which are this class with other defaults.

    Scores w_i u_i^T A^-1 u_i with A = ridge·I + sum_j (w_j + weight_eps) u_j u_j^T and u = v: the
    capacity that token i adds to a linear-Gaussian channel from query to output. One A per query
    head, in float64. Cost: O(H·(e·D^2 + N·(D^2 + Dv^2) + Dv^3)).

    Attributes:
        relevance: `softmax` of z/tau; `exp_dot` exp(tau·z); `exp_cosine` exp(tau·cosine); `ones`.
        tau: temperature of the softmax, or factor in the exponent.
        shift: `max` subtracts the largest exponent of the exp relevances, `none` does not.
        sensitivity: `saturating` weighs by [a (1 - a)]^2, `none` by the relevance itself.
        response: times s^2 k^T covariance k: `diagonal` of the covariance, `full`, or `none`.
        leverage: off replaces A by ridge·I, leaving w |u|^2 / ridge.
        ridge: a number, `identity` (1), or `relative`: the mean weight of the scored tokens (1 if all are 0).
        weight_eps: added to the weights in A only.
        exclude_first: first rows left out of weights and A, and protected.
        exclude_statistics: first queries left out of the query statistics.
        statistics: `rope_mean` un-rotates past queries and turns them by the mean future rotation,
            `prompt` takes them as they were.
        horizon: positions in the mean future rotation.
        group: how the query heads of a KV head combine.
    """

    relevance: Relevance = "softmax"
    tau: float = 1.0
    shift: Shift = "max"
    sensitivity: Literal["saturating", "none"] = "saturating"
    response: Response = "diagonal"
    leverage: bool = True
    ridge: Literal["identity", "relative"] | float = "identity"
    weight_eps: float = 0.0
    exclude_first: int = 0
    exclude_statistics: int = 4
    statistics: StatisticsSource = "rope_mean"
    horizon: int = 512
    group: Literal["mean", "max"] = "mean"

    @property
    def needs(self) -> tuple[str, ...]:  # type: ignore[override]
        if self.statistics == "prompt":
            return ("prompt-queries",)
        return ("prompt-queries", "rotation", "future-rotation")

    def __post_init__(self) -> None:
        check_choices(self)
        check_positive(self, "tau")
        check_at_least(self, 0, "weight_eps", "exclude_first", "exclude_statistics")
        check_at_least(self, 1, "horizon")
        if not isinstance(self.ridge, str):
            check_positive(self, "ridge")
        if self.sensitivity == "saturating" and self.relevance != "softmax":
            raise ValueError(f"sensitivity=saturating needs relevance=softmax, not {self.relevance}")

    def protection(self, budget: int) -> Protection:
        return Protection(sinks=self.exclude_first)

    def score(self, state: Any, view: View) -> Tensor:
        """[Hk, N] float64; 0 for the excluded first rows, which are protected.

        Raises:
            KvtoolError: code `policy-broken` where A cannot be factored.
        """
        return reduce_group(self.query_head_scores(view).scores, view.geometry.kv_heads, self.group)

    def query_head_scores(self, view: View) -> Leverage:
        """Scores [H, N] before the group is reduced, and rho [H]. Computed once per view."""
        if self not in view.memo:
            view.memo[self] = self._leverage_of(view)
        found: Leverage = view.memo[self]
        return found

    def diagnose(self, state: Any, view: View) -> dict[str, Tensor]:
        """`rho` [H]: mean leverage per value channel, in [0, 1). Near 0 the redundancy term is idle."""
        return {"rho": self.query_head_scores(view).rho}

    def _leverage_of(self, view: View) -> Leverage:
        geometry = view.geometry
        expected = expected_statistics(view, self.statistics, self.exclude_statistics, self.horizon)
        scored = view.tokens >= self.exclude_first  # [Hk, N]
        weights = torch.zeros(geometry.query_heads, view.tokens.shape[1], dtype=torch.float64)
        ridge = torch.ones(geometry.query_heads, dtype=torch.float64)
        for head in range(geometry.query_heads):
            here = scored[head // geometry.group]
            if bool(here.any()):
                weights[head, here] = self._weights(view, expected, head, here)
                ridge[head] = self._ridge(weights[head, here])
        directions = view.values * scored[..., None]
        if not self.leverage:
            norms = directions.to(torch.float64).square().sum(-1).repeat_interleave(geometry.group, dim=0)
            scores = weights * norms / ridge[:, None]
            return Leverage(scores, scores.sum(1) / geometry.value_dim)
        try:
            return leverage_scores(directions, weights, ridge, self.weight_eps)
        except LeverageError as error:
            raise KvtoolError(
                "policy-broken",
                f"{error} (layer {geometry.layer}, step {view.step})",
                "a smaller tau or shift=max keeps the weights finite",
            ) from None

    def _weights(self, view: View, expected: QueryStatistics, head: int, scored: Tensor) -> Tensor:
        """[n] float64, one query head's weights of its scored tokens."""
        geometry = view.geometry
        keys = view.keys[head // geometry.group][scored].to(torch.float64)
        mean = expected.mean[head]
        z, slope = logits_and_slope(keys, mean, geometry.scale, geometry.softcap)
        sink = None if geometry.sink_logits is None else float(geometry.sink_logits[head])
        weights = relevance(self.relevance, keys, mean, z, tau=self.tau, shift=self.shift, sink_logit=sink)
        if self.sensitivity == "saturating":
            weights = (weights * (1 - weights)).square()
        if self.response != "none":
            variance = response_variance(keys, slope, expected.covariance[head], self.response)
            weights = weights * geometry.scale**2 * variance
        return weights

    def _ridge(self, weights: Tensor) -> float:
        if self.ridge == "identity":
            return 1.0
        if self.ridge == "relative":
            return float(weights.mean()) or 1.0
        return float(self.ridge)
