"""Wins: which side is better head by head and layer by layer, and which heads got worse the most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvtool.compare.groups import Key, group_ids
from kvtool.compare.kinds import KINDS
from kvtool.compare.measured import Means, Values, mean_of_known, means, over_sequences, ratio
from kvtool.compare.pairs import Ids, Numbers, Pairs, finite
from kvtool.compare.statistics import holm, paired_p
from kvtool.compare.tolerance import Tolerance, verdict

SHOWN, ALPHA = 10, 0.05


@dataclass(frozen=True, eq=False)
class Won:
    """Per group, how many (sequence, layer, query head) are better in A, in B, or in neither beyond the tolerance."""

    a: Ids
    b: Ids
    even: Ids

    def of(self, group: int) -> dict[str, int]:
        return {"a": int(self.a[group]), "b": int(self.b[group]), "even": int(self.even[group])}


def won(values: Values, ids: Ids, count: int, tolerance: Tolerance) -> Won:
    """Count the wins of one head column, of which less is better; what is null in a side is left out."""
    known = ~(np.isnan(values.a) | np.isnan(values.b)) & (ids >= 0)
    difference = (values.b - values.a)[known]
    allowed = tolerance.allowed(values.compared.column.name, values.a[known])
    mine = ids[known]
    masks = (difference > allowed, -difference > allowed, np.abs(difference) <= allowed)
    return Won(*(np.bincount(mine[mask], minlength=count) for mask in masks))


@dataclass(frozen=True, eq=False)
class Parts:
    """Finer groups inside the groups: their keys, and for each group where its own stand."""

    keys: list[Key]
    ids: Ids
    of_group: dict[int, list[int]]


def parts_of(pairs: Pairs, groups: dict[Key, int], places: Sequence[str], finer: Sequence[str]) -> Parts:
    """The entries of `pairs` by `places` and `finer` together, those of other groups left out."""
    together = [*places, *(place for place in finer if place not in places)]
    ids, known = group_ids(pairs, together)
    inside: dict[int, list[int]] = {}
    for key, index in known.items():
        group = groups.get(Key(key.cells, key.event, key.places[: len(places)]))
        if group is not None:
            inside.setdefault(group, []).append(index)
    return Parts(list(known), ids, inside)


def layer_entries(
    layers: Sequence[int], kinds: Ids, metric: str | None, found: Means | None, wins: Won | None, tolerance: Tolerance
) -> list[dict[str, Any]]:
    """One entry per layer (of one or several groups, in their order); the arrays are [len(layers)]."""
    nothing = np.full(len(layers), np.nan)
    a, b = (nothing, nothing) if found is None else (mean_of_known(found.a), mean_of_known(found.b))
    difference = nothing if found is None else mean_of_known(found.differences)
    entries = []
    for index, layer in enumerate(layers):
        entry = {"layer": layer, "kind": KINDS[kinds[index]], "metric": metric}
        entry |= {"a": finite(a[index]), "b": finite(b[index]), "difference": finite(difference[index])}
        entry["verdict"] = _judged(found, index, difference, a, tolerance, metric)
        counted = {"a": 0, "b": 0, "even": 0} if wins is None else wins.of(index)
        entries.append({**entry, **{f"wins_{side}": counted[side] for side in "ab"}, "even": counted["even"]})
    return entries


def _judged(
    found: Means | None, index: int, difference: Numbers, a: Numbers, tolerance: Tolerance, metric: str | None
) -> str:
    if found is None or metric is None:
        return "undefined"
    if found.same[index]:
        return "same"
    if np.isnan(difference[index]):
        return "undefined"
    return verdict(float(difference[index]), float(tolerance.allowed(metric, a[index : index + 1])[0]), "lower")


@dataclass(frozen=True, eq=False)
class Heads:
    """The query heads of every group, and what the test over sequences says of each.

    Attributes:
        entries: group -> `worst_heads`; significant: group -> `significant_heads`.
    """

    entries: dict[int, list[dict[str, Any]]]
    significant: dict[int, dict[str, Any]]


def compare_heads(
    values: Values,
    pairs: Pairs,
    groups: dict[Key, int],
    places: Sequence[str],
    sequences: Sequence[int],
    tolerance: Tolerance,
) -> Heads:
    """Every query head over the sequences: paired t test, Holm's adjustment inside each group, and of the heads that
    got worse the ten that did so the most."""
    together = [*places, *(place for place in ("layer", "kv_head", "q_head") if place not in places)]
    parts = parts_of(pairs, groups, places, ("layer", "kv_head", "q_head"))
    named = [dict(zip(together, key.places, strict=True)) for key in parts.keys]
    found = means(values, parts.ids, pairs.sequence, len(parts.keys), sequences)
    differences = found.differences
    difference, a, b = mean_of_known(differences), mean_of_known(found.a), mean_of_known(found.b)
    p = _tests(differences)
    adjusted = np.full(len(p), np.nan)
    significant, worst = {}, {}
    for group, mine in parts.of_group.items():
        index = np.asarray(mine)
        adjusted[index] = holm(p[index])
        sure = adjusted[index] <= ALPHA
        counted = {"worse": int((sure & (difference[index] > 0)).sum())}
        counted |= {"better": int((sure & (difference[index] < 0)).sum()), "tested": int((~np.isnan(p[index])).sum())}
        significant[group] = {**counted, "alpha": ALPHA}
        worse = index[difference[index] > 0]
        worst[group] = worse[np.argsort(-difference[worse], kind="stable")][:SHOWN].tolist()
    shown = [head for heads in worst.values() for head in heads]
    spread = over_sequences(differences[shown])
    allowed = tolerance.allowed(values.compared.column.name, a)
    entries = {
        head: {
            **{name: named[head][name] for name in ("layer", "q_head", "kv_head")},
            "a": finite(a[head]),
            "b": finite(b[head]),
            "difference": finite(difference[head]),
            "ratio": ratio(a[head], b[head]),
            **spread.ends(place),
            "p": finite(p[head]),
            "p_holm": finite(adjusted[head]),
            "verdict": verdict(float(difference[head]), float(allowed[head]), "lower"),
        }
        for place, head in enumerate(shown)
    }
    return Heads({group: [entries[head] for head in heads] for group, heads in worst.items()}, significant)


def _tests(differences: Numbers) -> Numbers:
    """[m] p of every row of differences [m, S] over the sequences it has; NaN below two."""
    found = np.full(len(differences), np.nan)
    known = ~np.isnan(differences)
    counts = known.sum(axis=1)
    for count in np.unique(counts[counts > 1]).tolist():
        rows = np.flatnonzero(counts == count)
        found[rows] = paired_p(differences[rows][known[rows]].reshape(len(rows), count))
    return found
