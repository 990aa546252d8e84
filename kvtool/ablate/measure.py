"""Measure: replay every point of a study, layer by layer, and keep what its tables need."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from kvtool.ablate.effects import Values
from kvtool.manifest import digest
from kvtool.metrics import PredictedKL
from kvtool.policies import Protection
from kvtool.replay.coverage import Coverages
from kvtool.replay.gather import Work, arrow_tables, by_sequence, cell_entries
from kvtool.replay.parts import Part, Store
from kvtool.replay.plan import Plan
from kvtool.replay.unit import run_unit
from kvtool.trace import Sequence, Trace

SMALL = 1024  # tokens before an event up to which one thread is quicker: splitting costs more than the work

Progress = Callable[[int, int, str], None]
# What can order a study, the most telling first.
ORDERING = ("predicted_kl", "mean_layer_error", "mean_output_error")


@dataclass(frozen=True, eq=False)
class Group:
    """The policies that one protection is shared by.

    Attributes:
        protected: share of the tokens before the event in percent; None is the run's own protection.
        plan: with the run's own protection; `at` gives the one for a sequence.
    """

    protected: str | None
    plan: Plan

    def at(self, step: int) -> Plan:
        """The plan for an event before `step`.

        A share is of all `step` tokens before the event, rounded down: the run's sinks first, as many as fit, and
        the newest for the rest.
        """
        if self.protected is None:
            return self.plan
        exact = Fraction(self.protected) / 100
        tokens = exact.numerator * step // exact.denominator
        sinks = min(self.plan.protection.sinks, tokens)
        return replace(self.plan, protection=Protection(sinks, tokens - sinks))


@dataclass(eq=False)
class Found:
    """What was measured of one group: slim parts in the order of the work, and overlaps with the reference.

    Attributes:
        overlaps: per cell and unit the mean Jaccard similarity, over KV heads, of what it and the reference keep.
        notes: of the reference, as `kvtool.replay.notes` writes them.
    """

    group: Group
    parts: list[Part] = field(default_factory=list)
    overlaps: list[list[float]] = field(default_factory=list)
    notes: list[dict[str, Any]] = field(default_factory=list)

    def cells(self, work: Work, covered: Coverages) -> list[dict[str, Any]]:
        """Replay's entries of `cells`, each with `overlap`."""
        entries = cell_entries(self.group.plan, work, self.parts, covered)
        places = by_sequence(work)
        for index, entry in enumerate(entries):
            cell = index // (len(places) + 1)
            units = places.get(entry["sequence"], range(len(work)))
            entry["overlap"] = math.fsum(self.overlaps[unit][cell] for unit in units) / len(units)
        return entries

    def values(self, cell: int, metric: str, work: Work, layer_ids: list[int], whole: list[float]) -> Values:
        """One metric of one cell; `whole` is its number for every sequence."""
        layers = np.full((len(whole), len(layer_ids)), np.nan)
        for row, places in enumerate(by_sequence(work).values()):
            partials = [self.parts[place].partials[cell] for place in places]
            found = _by_layer(metric, partials)
            for place, value in zip(places, found, strict=True):
                layers[row, layer_ids.index(work[place][1])] = value
        return Values(np.array(whole, dtype=np.float64), layers)


def _by_layer(metric: str, partials: list[dict[str, dict[str, torch.Tensor]]]) -> list[float]:
    """One number a layer, scaled so that their mean is the sequence's number; NaN is undefined."""
    if metric == "mean_layer_error":
        return [float(partial["layer_error"]["layer_error"]) for partial in partials]
    if metric == "mean_output_error":
        heads = [partial["output_error"]["output_error"] for partial in partials]
        known = sum(int((~torch.isnan(layer)).sum()) for layer in heads)
        scale = sum(bool((~torch.isnan(layer)).any()) for layer in heads) / max(known, 1)
        return [float(torch.nansum(h)) * scale if bool((~torch.isnan(h)).any()) else math.nan for h in heads]
    shares = PredictedKL().shares([partial[PredictedKL.name] for partial in partials])["predicted_kl_share"]
    drawn = sum(bool((~torch.isnan(share)).all()) for share in shares)
    return [float(share.sum()) * drawn for share in shares]


@contextlib.contextmanager
def threads_for(work: Work, threads: int | None) -> Iterator[None]:
    """CPU threads for a study: `threads`, else one for small traces and torch's choice for larger ones."""
    before = torch.get_num_threads()
    small = max(step for _, _, step in work) <= SMALL
    torch.set_num_threads(threads or (1 if small else before))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measure(
    trace: Trace, groups: list[Group], reference: str, work: Work, store: Store | None, progress: Progress | None
) -> list[Found]:
    """Every group on every unit. The first group holds the policy `reference`, which the others are held against."""
    found = [Found(group) for group in groups]
    for done, (sequence, layer_id, step) in enumerate(work):
        base: list[np.ndarray] = []  # per budget [Hk, N] bool: what the reference keeps
        for place, mine in enumerate(found):
            if progress is not None:
                so_far, total = done * len(groups) + place, len(work) * len(groups)
                progress(so_far, total, f"sequence {sequence.index} layer {layer_id}")
            plan = mine.group.at(step)
            part = _part(trace, sequence, layer_id, step, plan, store)
            kept = _kept(part, plan, sequence, layer_id, step)
            budgets = len(plan.budgets)
            if place == 0:
                first = [label for label, _ in plan.policies].index(reference) * budgets
                base = kept[first : first + budgets]
            mine.overlaps.append([_jaccard(one, base[cell % budgets]) for cell, one in enumerate(kept)])
            mine.notes += [note for note in part.notes if note["policy"] == reference]
            mine.parts.append(_slim(part))
    return found


def _part(trace: Trace, sequence: Sequence, layer_id: int, step: int, plan: Plan, store: Store | None) -> Part:
    """The unit's outcome, taken from the store where it was finished before."""
    if store is None:
        return run_unit(sequence, layer_id, plan, step, which="errors")
    unit = {**plan.identity(trace), "unit": [sequence.index, layer_id]}
    name, key = f"{sequence.index:04d}-{layer_id:03d}", digest(unit)
    part = store.load(name, key)
    if part is None:
        part = run_unit(sequence, layer_id, plan, step, which="errors")
        store.save(name, key, part)
    return part


def _slim(part: Part) -> Part:
    """Without tables, and gradients summed over heads: a study of a large trace must fit into memory."""
    partials = []
    for cell in part.partials:
        gradients = cell[PredictedKL.name]
        summed = gradients["dot"].to(torch.float64).sum(1, keepdim=True)
        partials.append({**cell, PredictedKL.name: {**gradients, "dot": summed}})
    return Part({}, partials)


def _kept(part: Part, plan: Plan, sequence: Sequence, layer_id: int, step: int) -> list[np.ndarray]:
    """Per cell [Hk, N] bool over the event's candidates."""
    entries = arrow_tables([part])[0]["evict_steps"].select(["evict_step"]).to_pylist()
    steps = np.array([entry["evict_step"] for entry in entries], dtype=np.int32)  # [cells·Hk, T]
    geometry = sequence.layer(layer_id).geometry
    start = int(geometry.first_visible(torch.tensor([step]))[0])
    kept = steps[:, start:step] > step
    return list(kept.reshape(len(plan.cells), -1, kept.shape[1]))


def _jaccard(a: np.ndarray, b: np.ndarray) -> float:
    """Mean over heads of |a and b| / |a or b|; 1 where both are empty."""
    either = (a | b).sum(-1)
    both = (a & b).sum(-1)
    return float(np.where(either > 0, both / np.maximum(either, 1), 1.0).mean())


def seconds(groups: list[Group], reference: str, dear: Mapping[str, set[str]], work: Work) -> float:
    """About how long `measure` will take: a few policies are timed on the first unit.

    Args:
        dear: label that may cost more than most -> labels that cost as much.
    """
    sequence, layer_id, step = work[0]
    plan = groups[0].plan
    policies = dict(plan.policies)

    def timed(labels: list[str]) -> float:
        started = time.perf_counter()
        run_unit(sequence, layer_id, plan.only([(label, policies[label]) for label in labels]), step, which="errors")
        return time.perf_counter() - started

    sample = list(dict.fromkeys([reference, *list(policies)[1:4]]))
    timed([reference])  # first calls load code and pages
    usual = timed(sample) / len(sample)
    costs = dict.fromkeys((label for group in groups for label, _ in group.plan.policies), usual)
    for label, alike in dear.items():
        cost = max(usual, timed([label]))
        costs |= dict.fromkeys(alike, cost)
    return len(work) * sum(costs[label] for group in groups for label, _ in group.plan.policies)
