"""The capacity family: leverage of what each token contributes to the output."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from kvtool.kernels.leverage import LeverageError
from kvtool.layer import Geometry
from kvtool.policies.attention_history import extend_history, history_of_candidates, no_history
from kvtool.policies.capacity_pool import Pool, Weights, pool_of, query_kinds, weights_of
from kvtool.policies.capacity_weights import Relevance, Response, Shift
from kvtool.policies.directions import DirectionKind
from kvtool.policies.floor import FloorKind, leave_one_out
from kvtool.policies.group import reduce_group
from kvtool.policies.moving_statistics import MovingStatistics
from kvtool.policies.objective import Objective
from kvtool.policies.parameters import check_at_least, check_choices, check_positive, check_share
from kvtool.policies.policy import Policy, Protection
from kvtool.policies.query_source import QuerySource, Statistics, parse_source
from kvtool.policies.query_statistics import VARIANCE_FLOOR, QueryStatistics, expected_statistics
from kvtool.policies.selectors import exhaustive, greedy, two_pass
from kvtool.view import View


@dataclass(frozen=True, eq=False)
class Scored:
    """What one event came to.

    Attributes:
        scores: [Hk, N] float64.
        rho: [H] float64, mean leverage per value channel.
        jitter: [H] float64, what had to be added to the diagonal of A, over its mean.
        fallback: [H] float64, 1 where the declared fallback scored the KV head, 2 where that failed too and
            key norms did.
    """

    scores: Tensor
    rho: Tensor
    jitter: Tensor
    fallback: Tensor


@dataclass(frozen=True, eq=False)
class Known:
    """The running state: the attention history [H, rows] that blending reads, and the moving average of queries;
    None what the policy does not read."""

    history: Tensor | None
    moving: MovingStatistics | None


@dataclass(frozen=True)
class Capacity(Policy):
    """Keeps what adds most to the capacity of a linear-Gaussian channel from query to output. Every choice that
    capacity policies differ in is a parameter; without any it is `jacap`.

    Scores w_i u_i^T A^-1 u_i with A = ridge·I + sum_j (w_j + weight_eps) u_j u_j^T, one A per query
    head, in float64. Deviations: none, `jacap`, `capkv` and `capkv-paper` are this class with other
    defaults. Cost: O(H·(e·D^2 + N·(D^2 + Dv^2) + Dv^3)); greedy adds O(H·B·N·Dv), blending O(H·e^2·D).

    The page docs/policies.md explains every parameter.
    """

    relevance: Relevance = "softmax"
    tau: float = 10.0
    shift: Shift = "max"
    sensitivity: Literal["saturating", "none"] = "saturating"
    response: Response = "diagonal"
    competition: Literal["diagonal", "centred"] = "diagonal"
    directions: DirectionKind = "values"
    fisher_steps: int = 256
    calibration: str | None = None
    leverage: bool = True
    ridge: Literal["identity", "relative"] | float = "identity"
    weight_eps: float = 0.0
    exclude_first: int = 0
    exclude_statistics: int = 4
    statistics: Statistics = "rope_mean"
    mixture_combine: Literal["mean", "worst", "assigned"] = "mean"
    variance_floor: float = VARIANCE_FLOOR
    horizon: int = 512
    blend: float = 1.0
    floor: FloorKind = "history"
    group: Literal["mean", "max"] = "mean"
    group_stage: Literal["score", "weight"] = "score"
    selector: Literal["one_shot", "two_pass", "greedy", "exhaustive"] = "one_shot"
    fallback: Literal["knorm", "no_leverage"] = "knorm"

    @property
    def source(self) -> QuerySource:
        """`statistics`, parsed."""
        return parse_source(self.statistics)

    @property
    def oracle(self) -> bool:  # type: ignore[override]
        return self.source.kind == "future"

    @property
    def nested(self) -> bool:  # type: ignore[override]
        return self.selector == "one_shot"  # greedy sets nest too, but no one ranking covers all budgets

    @property
    def needs(self) -> tuple[str, ...]:  # type: ignore[override]
        found = list(self.source.needs)
        found += ["prompt-queries"] * (self.blend < 1)
        found += ["output-projection"] * (self.directions == "outputs")
        found += ["prompt-gradients"] * (self.directions == "fisher" and self.calibration is None)
        return tuple(dict.fromkeys(found))

    @property
    def calibration_trace(self) -> str | None:
        return self.calibration

    def queries_back(self, step: int) -> int:
        if self.source.kind == "window" and self.blend == 1:
            return min(self.source.count, step)
        return super().queries_back(step)

    def __post_init__(self) -> None:
        check_choices(self)
        check_positive(self, "tau")
        check_at_least(self, 0, "weight_eps", "exclude_first", "exclude_statistics", "variance_floor")
        check_at_least(self, 1, "horizon", "fisher_steps")
        check_share(self, "blend")
        if self.calibration is not None and self.directions != "fisher":
            raise ValueError("calibration names the trace that directions=fisher reads, and directions are others")
        object.__setattr__(self, "statistics", str(self.source))  # one spelling of one choice
        if not isinstance(self.ridge, str):
            check_positive(self, "ridge")
        if self.sensitivity == "saturating" and self.relevance != "softmax":
            raise ValueError(f"sensitivity=saturating needs relevance=softmax, not {self.relevance}")
        if self.competition == "centred" and self.sensitivity != "saturating":
            raise ValueError("competition=centred is the response of a softmax: it needs sensitivity=saturating")
        if self.competition == "centred" and self.source.kind == "mixture":
            raise ValueError("competition=centred takes directions from one centre, and statistics=mixture has several")
        if self.group_stage == "weight" and (self.competition, self.directions) != ("diagonal", "values"):
            raise ValueError(
                "group_stage=weight has one matrix per KV head, so its query heads must share their directions: "
                "competition=diagonal and directions=values"
            )
        if self.selector != "one_shot" and not self.leverage:
            raise ValueError(
                f"selector={self.selector} chooses tokens together, which leverage=false scores one by one"
            )
        if self.selector == "exhaustive" and (self.group, self.group_stage) == ("max", "score"):
            raise ValueError("selector=exhaustive adds up the capacity of query heads: it needs group=mean")

    def protection(self, budget: int) -> Protection:
        return Protection(sinks=self.exclude_first)

    def start(self, geometry: Geometry) -> Known:
        history = no_history(geometry) if self.blend < 1 and self.floor == "history" else None
        if self.source.kind != "ema":
            return Known(history, None)
        beta, full = float(self.source.number or 0), self.response == "full"
        return Known(history, MovingStatistics.nothing(geometry, beta, self.exclude_statistics, full))

    def observe(self, state: Known, view: View) -> Known:
        history = None if state.history is None else extend_history(state.history, view)
        return Known(history, None if state.moving is None else state.moving.extended(view))

    def score(self, state: Any, view: View) -> Tensor:
        """[Hk, N] float64; 0 for the excluded first rows, which are protected."""
        self._weights(view, state)
        return self._scored(view).scores

    def diagnose(self, state: Any, view: View) -> dict[str, Tensor]:
        """`rho` [H]: mean leverage per value channel, in [0, 1), near 0 the redundancy term is idle; `jitter` and
        `fallback` [H], 0 where nothing went wrong (see Scored)."""
        found = self._scored(view)
        return {"rho": found.rho, "jitter": found.jitter, "fallback": found.fallback}

    def refine(self, scores: Tensor, view: View, allowed: list[int], shield: Protection) -> Tensor:
        """[Hk, N]: scores that a cut at `allowed` turns into the selector's set; as they were where there is
        nothing to choose, or where the fallback scored."""
        if self.selector == "one_shot":
            return scores
        found, refined, group = self._scored(view), scores.clone(), view.geometry.group
        # What goes wrong at this budget is said of it alone: others may share what was scored.
        found = replace(found, jitter=found.jitter.clone(), fallback=found.fallback.clone())
        view.memo[self, "scored"] = view.tokens, found
        for head, budget in enumerate(allowed):
            rows, heads = view.tokens[head], slice(head * group, (head + 1) * group)
            protected = (rows < shield.sinks) | (rows >= view.step - shield.window)
            if bool(found.fallback[heads].any()) or not int(protected.sum()) < budget < len(rows):
                continue
            pool, jitter = self._pool(view, head), torch.zeros(1, dtype=torch.float64)
            try:
                if self.selector == "two_pass":
                    refined[head], jitter = two_pass(pool, scores[head], protected, budget, self.weight_eps, self.group)
                elif self.selector == "greedy":
                    refined[head], jitter = greedy(pool, protected, budget, self.group)
                else:
                    refined[head], jitter = exhaustive(pool, protected, budget)
            except ValueError:  # no factor: the one-shot set stays, and the fallback column says so
                found.fallback[heads] = 1.0
            torch.maximum(found.jitter[heads], jitter.expand(group), out=found.jitter[heads])
        return refined

    def query_statistics(self, view: View) -> QueryStatistics:
        """Mean and covariance of the expected queries; of a mixture those of the whole, or of the newest query's kind
        where that alone is expected."""
        if self.source.kind == "mixture" and self.mixture_combine == "assigned":
            kinds = [kind for (kind,) in query_kinds(self, view)]
            found = QueryStatistics(torch.stack([k.mean for k in kinds]), torch.stack([k.covariance for k in kinds]))
        else:
            past = (self.source, self.exclude_statistics, self.horizon, self.variance_floor)
            found = expected_statistics(view, *past)
        return found.diagonal_only() if self.response == "diagonal" else found

    def objective(self, view: View) -> Objective | None:
        """Weights and directions of the log-determinant whose first step the scores are; the part of A that belongs
        to no token (a sink logit under competition) is absorbed into the directions. None where a weight is not
        finite, so that a fallback scored."""
        weights, directions, ridge, group = [], [], [], view.geometry.group
        for head in range(view.geometry.kv_heads):
            pool = self._pool(view, head)
            weights.append(pool.weights.expand(group, -1))
            directions.append(pool.absorbed().expand(group, -1, -1))
            ridge.append(pool.ridge.expand(group))
        found = Objective(torch.cat(weights), torch.cat(directions), torch.cat(ridge))
        return found if bool(found.weights.isfinite().all() and found.directions.isfinite().all()) else None

    def _weights(self, view: View, state: Known | None = None) -> Weights:
        """The weights of a view, made once; what the state knows is computed anew where nobody gave it.

        A view of other tokens may share the memo (`dataclasses.replace`): only the queries are the same there.
        """
        if (self, "queries", view.step) not in view.memo:
            view.memo[self, "queries", view.step] = query_kinds(self, view, None if state is None else state.moving)
        tokens, found = view.memo.get((self, "weights"), (None, None))
        if tokens is not view.tokens:
            floor = None
            if self.blend < 1 and self.floor == "leave_one_out":
                floor = leave_one_out(view)
            elif self.blend < 1:
                known = None if state is None else state.history
                known = extend_history(no_history(view.geometry), view.past()) if known is None else known
                floor = history_of_candidates(known, view)
            found = weights_of(self, view, view.memo[self, "queries", view.step], floor)
            view.memo[self, "weights"] = view.tokens, found
        assert isinstance(found, Weights)
        return found

    def _pool(self, view: View, kv_head: int) -> Pool:
        return pool_of(self, view, self._weights(view), kv_head)

    def _scored(self, view: View) -> Scored:
        tokens, found = view.memo.get((self, "scored"), (None, None))
        if tokens is not view.tokens:
            found = self._score_all(view)
            view.memo[self, "scored"] = view.tokens, found
        assert isinstance(found, Scored)
        return found

    def _score_all(self, view: View) -> Scored:
        geometry = view.geometry
        group, count = geometry.group, view.tokens.shape[1]
        by_head = torch.zeros(geometry.query_heads, count, dtype=torch.float64)
        jitter, fallback = (torch.zeros(geometry.query_heads, dtype=torch.float64) for _ in range(2))
        instead: dict[int, Tensor] = {}
        for head in range(geometry.kv_heads):
            pool, heads = self._pool(view, head), slice(head * group, (head + 1) * group)
            try:
                if self.leverage:
                    found = pool.leverage(self.weight_eps)
                    by_head[heads], jitter[heads] = found.scores, found.jitter
                else:
                    by_head[heads] = pool.norms()
            except LeverageError:
                by_head[heads] = torch.nan
            if not bool(by_head[heads].isfinite().all()):
                instead[head], fallback[heads] = self._fall_back(view, head, pool)
                by_head[heads] = 0.0
        scores = reduce_group(by_head, geometry.kv_heads, self.group)
        for head, replaced in instead.items():
            scores[head] = replaced
        return Scored(scores, by_head.sum(1) / geometry.value_dim, jitter, fallback)

    def _fall_back(self, view: View, kv_head: int, pool: Pool) -> tuple[Tensor, float]:
        """[N] scores of a KV head whose matrix has no factor, and 1, or 2 where key norms stand in for them too."""
        if self.fallback == "no_leverage":
            norms = reduce_group(pool.norms(), 1, self.group)[0]
            if bool(norms.isfinite().all()):
                return norms, 1.0
        lengths = torch.linalg.vector_norm(view.keys[kv_head].to(torch.float64), dim=-1)
        return -lengths, 1.0 if self.fallback == "knorm" else 2.0
