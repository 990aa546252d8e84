"""The regret ladder: on small sub-pools, where the damage of a policy's choice was bought, rung by rung.

`one` is the policy's own set, `diag` maximises the policy's own objective, `full` the capacity of the full
tangent with the pool's weights, `ren` with weights renormalised in the set, `lin` brings the local linear
picture closest to the outputs, `best` does the least damage. All but `one` are exact; of sets that tie,
the lexicographically newest. Undefined is None: everything between `one` and `best` where the policy has
no objective, and the capacities of the tangent where a noise is not above 0.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvtool.decomposition import selectors
from kvtool.decomposition.capacity import Centre, OwnObjective, Tangents
from kvtool.decomposition.damage import Damage
from kvtool.decomposition.local_fit import LocalFit
from kvtool.decomposition.search import Best, check_search, number_of, one_thread, smallest, subsets
from kvtool.decomposition.subpools import SubPool
from kvtool.errors import KvtoolError
from kvtool.metrics.student_t import two_sided

RUNGS = ("one", "diag", "full", "ren", "lin", "best")
STEPS = ("selection", "diagonal", "renormalisation", "information", "linearity")  # between neighbouring rungs
COLUMNS = (
    "output_energy",
    *(f"damage_{rung}" for rung in RUNGS),
    *(f"ladder_{step}" for step in STEPS),
    "ladder_total",
    "capacity_best",
    *(f"capacity_gap_{name}" for name in ("one_shot", "two_pass", "greedy")),
    *(f"damage_gap_{name}" for name in ("one_shot", "two_pass", "greedy")),
    *(f"damage_gap_capacity_{name}" for name in ("two_pass", "greedy", "exhaustive")),
)


@dataclass(eq=False)
class Damages:
    """What a sub-pool says about damage whatever the policy; policies share it.

    Attributes:
        damage: of any set.
        best: the set of least damage.
        two_pass, greedy: [b] sets that selectors find by damage.
    """

    damage: Damage
    keep: int
    best: Best
    two_pass: Tensor
    greedy: Tensor
    _rungs: list[tuple[SubPool, Tensor, Tensor, dict[str, Tensor]]] = field(default_factory=list)

    def tangent_rungs(self, pool: SubPool, sigma2: Tensor) -> dict[str, Tensor]:
        """Sets of the rungs `full`, `ren` and `lin`, found once for policies of the same centre and covariance."""
        centre = Centre.of(pool)
        for other, noise, weights, sets in self._rungs:
            same = (other.mean, pool.mean), (other.covariance, pool.covariance), (noise, sigma2)
            if all(torch.equal(a, b) for a, b in (*same, (weights, centre.weights))):
                return sets
        sets = _tangent_rungs(pool, centre, self.damage, self.keep, sigma2)
        self._rungs.append((pool, sigma2, centre.weights, sets))
        return sets


@dataclass(frozen=True, eq=False)
class Study:
    """One sub-pool.

    Attributes:
        values: every name of `COLUMNS`, None where undefined.
        sets: [b] indices into the sub-pool, by rung, and `two_pass`, `greedy` (by damage),
            `capacity_two_pass`, `capacity_greedy`; only those that are defined.
    """

    values: dict[str, float | None]
    sets: dict[str, Tensor]


@one_thread()
def damages(pool: SubPool, keep: int) -> Damages:
    """Search all subsets of `keep` tokens for the least damage; nothing of the policy is read.

    Raises:
        KvtoolError: code `usage` for more subsets than exact search takes.
    """
    check_search(pool.tokens, keep)
    damage = Damage(pool)

    def score(inside: Tensor) -> Tensor:
        if len(inside) == 1:
            return torch.zeros(1, dtype=torch.float64)
        others = ~torch.eye(len(inside), dtype=torch.bool)
        return damage.of(torch.stack([inside[row] for row in others]))[0]

    two_pass = selectors.two_pass(score, pool.tokens, keep)
    greedy = selectors.greedy(lambda sets: damage.of(sets)[0], pool.tokens, keep, damage.addition_bounds)
    seeds = [number_of(kept, pool.tokens) for kept in (two_pass, greedy)]
    all_sets = subsets(pool.tokens, keep)
    value, noise = damage.of(torch.stack([two_pass, greedy]))
    bounds = damage.bounds(keep, float((value + noise).min()))
    best = smallest(bounds, lambda n, limit: damage.of(all_sets[n], limit), seeds)
    return Damages(damage, keep, best, two_pass, greedy)


@one_thread()
def study(pool: SubPool, keep: int, sigma2: Tensor, found: Damages | None = None) -> Study:
    """Selection gaps and ladder of one sub-pool.

    Args:
        keep: b, tokens kept.
        sigma2: [G] noise of `full` and `ren`.
        found: `damages(pool, keep)`, where several policies share the sub-pool.

    Raises:
        KvtoolError: `usage` for more subsets than exact search takes; `shape`; `internal` where a set beats
            the exact best.
    """
    found = found or damages(pool, keep)
    if found.keep != keep or found.damage.tokens != pool.tokens:
        raise KvtoolError(
            "internal", f"damages of keeping {found.keep} of {found.damage.tokens} were given for another"
        )
    if pool.one_shot.shape != (keep,) or len(pool.one_shot.unique()) != keep:
        raise KvtoolError("shape", f"one_shot {list(pool.one_shot.shape)} must hold {keep} different tokens")
    all_sets = subsets(pool.tokens, keep)
    sets = {"one": pool.one_shot, "two_pass": found.two_pass, "greedy": found.greedy}
    values: dict[str, float | None] = dict.fromkeys(COLUMNS)
    values["output_energy"] = found.damage.energy
    if pool.objective is not None:
        own = OwnObjective(pool.objective)
        sets["capacity_two_pass"] = selectors.two_pass(selectors.leverage(pool.objective), pool.tokens, keep)
        sets["capacity_greedy"] = selectors.greedy(lambda kept: own.of(kept)[0], pool.tokens, keep)
        seeds = [number_of(sets[name], pool.tokens) for name in ("capacity_two_pass", "capacity_greedy")]
        most = smallest(own.bounds(keep), lambda n, limit: own.of(all_sets[n], limit), seeds)
        sets["diag"] = all_sets[most.number].long()
        values["capacity_best"] = -most.value
        for name, kept in (("one_shot", "one"), ("two_pass", "capacity_two_pass"), ("greedy", "capacity_greedy")):
            value, noise = own.of(sets[kept][None])
            values[f"capacity_gap_{name}"] = most.settle(float(value), float(noise), "capacity") - most.value
        sets |= found.tangent_rungs(pool, sigma2)
    sets["best"] = all_sets[found.best.number].long()
    values |= _damage_columns(sets, found)
    return Study(values, sets)


def _damage_columns(sets: dict[str, Tensor], found: Damages) -> dict[str, float | None]:
    value, noise = found.damage.of(torch.stack(list(sets.values())))
    cost: dict[str, float] = {
        name: found.best.settle(float(v), float(n), "damage") for name, v, n in zip(sets, value, noise, strict=True)
    }
    columns: dict[str, float | None] = {f"damage_{rung}": cost.get(rung) for rung in RUNGS}
    for step, (here, below) in zip(STEPS, itertools.pairwise(RUNGS), strict=True):
        columns[f"ladder_{step}"] = cost[here] - cost[below] if here in cost and below in cost else None
    columns["ladder_total"] = cost["one"] - cost["best"]
    for column, name in (
        ("one_shot", "one"),
        ("two_pass", "two_pass"),
        ("greedy", "greedy"),
        ("capacity_two_pass", "capacity_two_pass"),
        ("capacity_greedy", "capacity_greedy"),
        ("capacity_exhaustive", "diag"),
    ):
        columns[f"damage_gap_{column}"] = cost[name] - cost["best"] if name in cost else None
    return columns


def _tangent_rungs(pool: SubPool, centre: Centre, damage: Damage, keep: int, sigma2: Tensor) -> dict[str, Tensor]:
    all_sets, seeds = subsets(pool.tokens, keep), [0]
    found = {}
    fit = LocalFit(pool, centre, damage)
    lin = smallest(fit.bounds(keep), lambda n, limit: fit.of(all_sets[n], limit), seeds)
    if bool((sigma2 > 0).all()):
        tangents = Tangents(pool, centre, sigma2)
        choices = {"full": centre.pool_weights, "ren": centre.own_weights}
        for (rung, weights), bound in zip(choices.items(), tangents.bounds(keep), strict=True):
            top = smallest(bound, lambda n, limit, w=weights: tangents.of(all_sets[n], w), seeds)  # type: ignore[misc]
            found[rung] = all_sets[top.number].long()
    found["lin"] = all_sets[lin.number].long()
    return found


def summarize(studies: list[Study]) -> dict[str, float | None]:
    """Mean over sub-pools of every column, and its Student t interval (95 %) as `<column>_low` and `<column>_high`.

    A sub-pool that lacks a column which others have (an objective that overflows there) is left out of all of
    them, so that means of parts add up to means of wholes, and is counted in `undefined_samples`. The interval
    needs two sub-pools.
    """
    known = [column for column in COLUMNS if any(each.values[column] is not None for each in studies)]
    whole = [each for each in studies if all(each.values[column] is not None for column in known)]
    summary: dict[str, float | None] = {"undefined_samples": len(studies) - len(whole)}
    studies = whole
    for column in COLUMNS:
        values = [v for v in (each.values[column] for each in studies) if v is not None]
        mean = math.fsum(values) / len(values) if values else None
        summary[column], summary[f"{column}_low"], summary[f"{column}_high"] = mean, None, None
        if mean is not None and len(values) > 1:
            variance = math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)
            half = two_sided(len(values) - 1) * math.sqrt(variance / len(values))
            summary[f"{column}_low"], summary[f"{column}_high"] = mean - half, mean + half
    return summary


__all__ = ["COLUMNS", "RUNGS", "STEPS", "Damages", "Study", "SubPool", "damages", "study", "summarize"]
