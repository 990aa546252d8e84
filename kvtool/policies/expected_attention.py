"""Expected Attention: the attention that queries yet to come are expected to pay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from kvtool.policies.group import reduce_group
from kvtool.policies.parameters import Reducer, check_at_least, check_choices
from kvtool.policies.policy import Policy, Protection
from kvtool.policies.quadratic_forms import quadratic_forms
from kvtool.policies.query_source import QuerySource
from kvtool.policies.query_statistics import QueryStatistics, expected_statistics, past_statistics
from kvtool.view import View


@dataclass(frozen=True)
class ExpectedAttention(Policy):
    """Treats future queries as a Gaussian with the statistics of the past ones, turned to future positions, and
    keeps the tokens of largest expected attention times value norm.

    Paper: Expected Attention, 2510.00636. Deviations: a sink logit joins the denominator, and
    with a softcap the mean logit is capped and the variance scaled by the cap's slope there (the
    paper has neither). Cost: O(H·(e + N)·D^2); with `exact` O(horizon·H·N·D^2).

    Attributes:
        horizon: future positions over which the rotation is averaged.
        sinks: first rows, left out of the statistics and of the scores, and protected.
        covariance: add the half quadratic term; off uses the mean query alone.
        value: `norm` |v|, `projected` |W_O v| of each query head (needs output projections), `none`.
        epsilon: added to the expected attention before the value factor.
        exact: average the closed form over positions rather than the rotation.
        group: how the query heads of a KV head combine.
    """

    horizon: int = 512
    sinks: int = 4
    covariance: bool = True
    value: Literal["norm", "projected", "none"] = "norm"
    epsilon: float = 0.0
    exact: bool = False
    group: Reducer = "mean"

    @property
    def needs(self) -> tuple[str, ...]:  # type: ignore[override]
        base = ("prompt-queries", "rotation", "future-rotation")
        return (*base, "output-projection") if self.value == "projected" else base

    def __post_init__(self) -> None:
        check_choices(self)
        check_at_least(self, 1, "horizon")
        check_at_least(self, 0, "sinks", "epsilon")

    def protection(self, budget: int) -> Protection:
        return Protection(sinks=self.sinks)

    def score(self, state: Any, view: View) -> Tensor:
        """[Hk, N] float64; 0 for the sinks, which are protected."""
        geometry = view.geometry
        logits = self._log_expected(view)  # [H, N] float64
        excluded = (view.tokens < self.sinks).repeat_interleave(geometry.group, dim=0)
        logits = logits.masked_fill(excluded, -torch.inf)
        total = torch.logsumexp(logits, dim=1, keepdim=True)
        if geometry.sink_logits is not None:
            total = torch.logaddexp(total, geometry.sink_logits.to(torch.float64)[:, None])
        attention = torch.where(excluded, 0.0, torch.exp(logits - total))
        weighted = (attention + self.epsilon) * self._value_factor(view) if self.value != "none" else attention
        return reduce_group(weighted.masked_fill(excluded, 0.0), geometry.kv_heads, self.group)

    def query_statistics(self, view: View) -> QueryStatistics:
        """Of the un-rotated past queries, turned by the mean rotation to come."""
        return expected_statistics(view, QuerySource("rope_mean"), self.sinks, self.horizon)

    def _log_expected(self, view: View) -> Tensor:
        """[H, N] float64, log of the expected exponential of each token's logit."""
        if not self.exact or view.rotation is None:
            expected = self.query_statistics(view)
            return self._log_moment(view, expected.mean, expected.covariance if self.covariance else None)
        past, rotation = past_statistics(view, "rope_mean", self.sinks), view.rotation
        # covariance = root^T root, so that rotating the rows of root rotates the covariance
        values, vectors = torch.linalg.eigh(past.covariance)
        root = (vectors * values.clamp_min(0).sqrt()[:, None, :]).transpose(1, 2)  # [H, D, D]
        total = None
        for position in view.next_positions(self.horizon):
            here = position[None].expand(1)
            mean = rotation.rotate(past.mean[:, None, :], here)[:, 0]
            turned = rotation.rotate(root[:, :, None, :], here)[:, :, 0]
            moment = self._log_moment(view, mean, turned.transpose(1, 2) @ turned if self.covariance else None)
            total = moment if total is None else torch.logaddexp(total, moment)
        assert total is not None
        return total - torch.log(torch.tensor(float(self.horizon), dtype=torch.float64))

    def _log_moment(self, view: View, mean: Tensor, covariance: Tensor | None) -> Tensor:
        """[H, N]: s·mean·k + s^2/2 k^T covariance k, for `mean` [H, D] and `covariance` [H, D, D]."""
        geometry, group = view.geometry, view.geometry.group
        logits = torch.empty(geometry.query_heads, view.tokens.shape[1], dtype=torch.float64)
        for kv_head, own in enumerate(view.keys):
            heads = slice(kv_head * group, (kv_head + 1) * group)
            keys = own.to(torch.float64)
            z = geometry.scale * (mean[heads] @ keys.T)  # [G, N]
            slope = torch.ones_like(z)
            if geometry.softcap is not None:
                z = geometry.softcap * torch.tanh(z / geometry.softcap)
                slope = 1 - (z / geometry.softcap) ** 2
            if covariance is not None:
                z += 0.5 * (geometry.scale * slope) ** 2 * quadratic_forms(keys, covariance[heads])
            logits[heads] = z
        return logits

    def _value_factor(self, view: View) -> Tensor:
        """[H, N] float64, |v| or |W_O^h v|."""
        group = view.geometry.group
        if self.value == "norm":
            norms = torch.stack([torch.linalg.vector_norm(head.to(torch.float64), dim=-1) for head in view.values])
            return norms.repeat_interleave(group, dim=0)
        projection = view.output_projection
        lengths = torch.empty(view.geometry.query_heads, view.tokens.shape[1], dtype=torch.float64)
        for kv_head, own in enumerate(view.values):
            heads = slice(kv_head * group, (kv_head + 1) * group)
            weight = projection[heads].to(torch.float64)  # [G, Dv, M]
            grams = weight @ weight.transpose(1, 2)  # |v W|^2 = v (W W^T) v^T: no [N, M] product
            lengths[heads] = quadratic_forms(own.to(torch.float64), grams).clamp_min_(0).sqrt_()
        return lengths
