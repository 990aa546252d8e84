"""Pool: the weighted directions of one KV head that a capacity policy chooses among."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvtool.kernels.leverage import Leverage, leverage_scores
from kvtool.policies.capacity_weights import centred_weights, logits_and_slope, relevance, response_variance
from kvtool.policies.directions import direction_map, directions
from kvtool.policies.floor import blended
from kvtool.policies.group import reduce_group
from kvtool.policies.mixture import Component, mixture_of
from kvtool.policies.moving_statistics import MovingStatistics
from kvtool.policies.query_statistics import expected_statistics
from kvtool.stopwatch import stage
from kvtool.view import View

if TYPE_CHECKING:
    from kvtool.policies.capacity import Capacity


@dataclass(frozen=True, eq=False)
class Weights:
    """What one layer's tokens weigh, before there are directions.

    Attributes:
        weights: [H, N] float64, 0 for tokens that are not scored.
        attention: [H, N] float64, the weights of the centre that directions are taken from; 0 without competition.
        sink: [H] float64, the weight of the centre itself.
    """

    weights: Tensor
    attention: Tensor
    sink: Tensor


def weights_of(policy: Capacity, view: View, kinds: list[list[Component]], floor: Tensor | None) -> Weights:
    """The weights of every query head.

    Args:
        kinds: per query head the kinds of query that are expected.
        floor: [H, N] what past queries found in each token, None where it is not blended in.
    """
    geometry = view.geometry
    heads, count = geometry.query_heads, view.tokens.shape[1]
    scored = view.tokens >= policy.exclude_first  # [Hk, N]
    zeros = torch.zeros(heads, count, dtype=torch.float64)
    found = Weights(zeros, zeros.clone(), torch.zeros(heads, dtype=torch.float64))
    for head in range(heads):
        here = scored[head // geometry.group]
        if not bool(here.any()):
            continue
        if head % geometry.group == 0:  # widened once for the group
            own = view.keys[head // geometry.group]
            keys = (own if bool(here.all()) else own[here]).to(torch.float64)
        sink_logit = None if geometry.sink_logits is None else float(geometry.sink_logits[head])
        if policy.competition == "centred":
            (kind,) = kinds[head]
            centred = centred_weights(
                keys,
                kind.mean,
                kind.covariance,
                policy.response,
                scale=geometry.scale,
                softcap=geometry.softcap,
                tau=policy.tau,
                sink_logit=sink_logit,
            )
            found.attention[head, here], found.sink[head] = centred.attention, centred.sink
            weights = centred.weights
        else:
            several = [_diagonal_weights(policy, view, keys, kind, sink_logit) for kind in kinds[head]]
            weights = several[0]
            if len(several) > 1 and policy.mixture_combine == "worst":
                weights = torch.stack(several).amax(0)
            elif len(several) > 1:
                weights = torch.stack([kind.share * w for kind, w in zip(kinds[head], several, strict=True)]).sum(0)
        if floor is not None:
            weights = blended(weights, floor[head, here], policy.blend)
        found.weights[head, here] = weights
    return found


def query_kinds(policy: Capacity, view: View, moving: MovingStatistics | None = None) -> list[list[Component]]:
    """Per query head the kinds of query that are expected: one, but for a mixture.

    Args:
        moving: the moving average up to the event where the policy's state has it; else it is computed anew.
    """
    source, floor = policy.source, policy.variance_floor
    if source.kind == "mixture":
        found = mixture_of(view, source.count, policy.exclude_statistics, policy.horizon)
        if policy.mixture_combine == "assigned":
            return [[kind for kind in kinds if kind.newest] for kinds in found]
        return found
    if moving is not None:
        expected = moving.statistics(floor)
    else:
        expected = expected_statistics(view, source, policy.exclude_statistics, policy.horizon, floor)
    return [[Component(1.0, *both)] for both in zip(expected.mean, expected.covariance, strict=True)]


def _diagonal_weights(policy: Capacity, view: View, keys: Tensor, kind: Component, sink_logit: float | None) -> Tensor:
    """[n] float64, one query head's weights of its scored tokens, without competition between them."""
    geometry = view.geometry
    z, slope = logits_and_slope(keys, kind.mean, geometry.scale, geometry.softcap)
    weights = relevance(policy.relevance, keys, kind.mean, z, tau=policy.tau, shift=policy.shift, sink_logit=sink_logit)
    if policy.sensitivity == "saturating":
        weights = (weights * (1 - weights)).square()
    if policy.response != "none":
        weights = weights * geometry.scale**2 * response_variance(keys, slope, kind.covariance, policy.response)
    return weights


@dataclass(frozen=True, eq=False)
class Pool:
    """The candidates of one KV head, seen by each of its query heads (g = G), or by all as one (g = 1).

    Attributes:
        weights: [g, N] float64, >= 0.
        directions: [g, N, r], or [1, N, r] where all share them.
        ridge: [g] float64, > 0.
        loose: [g, r] float64, a direction (times the root of its weight) in A that no token brings; None without.
    """

    weights: Tensor
    directions: Tensor
    ridge: Tensor
    loose: Tensor | None = None

    def leverage(self, weight_eps: float) -> Leverage:
        """Raises LeverageError where A cannot be factored."""
        with stage("factorisation"):
            return leverage_scores(self.directions, self.weights, self.ridge, weight_eps, self.loose)

    def norms(self) -> Tensor:
        """[g, N] float64, the scores without leverage: w |u|^2 / ridge."""
        lengths = self.directions.to(torch.float64).square().sum(-1)
        return self.weights * lengths / self.ridge[:, None]

    def only(self, tokens: Tensor) -> Pool:
        """The same weights, ridge and directions for `tokens` [n] (indices) alone."""
        return Pool(self.weights[:, tokens], self.directions[:, tokens], self.ridge, self.loose)

    def absorbed(self) -> Tensor:
        """[g, N, r] float64, directions in which A without tokens is ridge·I: the loose one is whitened away.

        (I + l l^T / ridge)^(-1/2) in closed form; log-determinants of sets differ by one constant.
        """
        u = self.directions.to(torch.float64).expand(len(self.weights), -1, -1)
        if self.loose is None:
            return u
        length = self.loose.square().sum(1, keepdim=True)  # [g, 1]
        along = self.loose / length.sqrt().clamp_min(torch.finfo(torch.float64).tiny)
        shrink = (1 + length / self.ridge[:, None]).rsqrt() - 1
        return u + (shrink * (u @ along[:, :, None])[..., 0])[..., None] * along[:, None, :]


def pool_of(policy: Capacity, view: View, found: Weights, kv_head: int) -> Pool:
    """The pool of one KV head. Directions are made here and not kept: a layer of them would be large."""
    geometry = view.geometry
    heads = range(kv_head * geometry.group, (kv_head + 1) * geometry.group)
    scored = view.tokens[kv_head] >= policy.exclude_first
    weights = found.weights[heads.start : heads.stop]
    values = view.values[kv_head] * scored[:, None]
    if policy.group_stage == "weight":
        weights = reduce_group(weights, 1, policy.group)
    ridge = torch.tensor([_ridge(policy, w[scored]) for w in weights], dtype=torch.float64)
    if policy.directions == "values":
        made = values[None]
    else:
        made = torch.stack(
            [
                directions(values, direction_map(view, policy.directions, h, policy.fisher_steps, policy.calibration))
                for h in heads
            ]
        )
    if policy.competition == "diagonal":
        return Pool(weights, made, ridge)
    made = made.to(torch.float64).expand(len(heads), -1, -1)
    attention, sink = (x[heads.start : heads.stop] for x in (found.attention, found.sink))
    centre = (attention[:, None, :] @ made)[:, 0]  # [G, r]
    loose = None if geometry.sink_logits is None else sink.sqrt()[:, None] * centre
    return Pool(weights, (made - centre[:, None, :]) * scored[:, None], ridge, loose)


def _ridge(policy: Capacity, weights: Tensor) -> float:
    if policy.ridge == "identity":
        return 1.0
    if policy.ridge == "relative":
        return (float(weights.mean()) or 1.0) if len(weights) else 1.0
    return float(policy.ridge)
