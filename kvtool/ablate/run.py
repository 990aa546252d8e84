"""Ablate: one study, from checked options to the Result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from kvtool.ablate.axes import PROTECTION, choose
from kvtool.ablate.design import Design, Variant, make_design
from kvtool.ablate.effects import Measured, interaction_entries, main_effects, steps, unit_of
from kvtool.ablate.measure import ORDERING, Found, Group, Progress, measure, seconds, threads_for
from kvtool.ablate.path import BESIDE, capkv_to_jacap, named
from kvtool.errors import KvtoolError
from kvtool.registry import did_you_mean
from kvtool.replay.coverage import Coverages, over_sequences
from kvtool.replay.decide import donor_of
from kvtool.replay.gather import Work, by_sequence, manifest_of
from kvtool.replay.notes import sentences
from kvtool.replay.parts import Store
from kvtool.replay.plan import Plan, make_plan
from kvtool.replay.serving import missing_for
from kvtool.replay.work import work_of
from kvtool.result import ABLATE, Result, table_of
from kvtool.trace import Trace, open_trace


def ablate(
    trace: str | Path | Trace,
    *,
    reference: str = "jacap",
    axes: str | None = None,
    interactions: bool = True,
    metric: str | None = None,
    ratios: Many[str | float | Fraction] = ("0.75",),
    sinks: int = 4,
    window: int = 32,
    layers: Iterable[int] | None = None,
    sequences: Iterable[int] | None = None,
    evaluate: str = "live",
    precision: str = "float32",
    threads: int | None = None,
    online: bool = False,
    output: str | Path | None = None,
    force: bool = False,
    progress: Progress | None = None,
    notes: Callable[[str], None] | None = None,
) -> Result:
    """Change a policy one choice at a time, and two at a time, and say what each change does.

    Prints nothing. With `output`, finished units are kept there and a stopped run resumes.

    Args:
        reference: the policy whose choices are changed, `name:key=value,…`.
        axes: names separated by commas; None is all of `kvtool.ablate.axes.AXES`. With names every level of one
            axis is tried with every level of every other.
        interactions: try changes two at a time as well.
        metric: `predicted_kl`, `mean_layer_error` or `mean_output_error`; None is the first that the trace serves.
        ratios, sinks, window, layers, sequences, evaluate, precision: as for kvtool.replay.
        threads: on the CPU; None is one for prompts up to 1,024 tokens, else torch's choice.
        online: whether `trace` may be an address.
        progress: called with (done, total, what); notes: with one sentence.

    Raises:
        KvtoolError: bad input of any kind, before anything is written.
    """
    if metric is not None and metric not in ORDERING:
        raise KvtoolError("usage", f"--metric {metric} is unknown", did_you_mean(metric, list(ORDERING)))
    chosen = choose(axes)
    design = make_design(reference, chosen, interactions=interactions, every_pair=axes is not None)
    design.own[PROTECTION] = f"{sinks} sinks, {window} newest"
    store = Store(Path(output), force) if output is not None else None
    opened = trace if isinstance(trace, Trace) else open_trace(trace, online=online)
    study = _prepare(
        opened,
        design,
        make_plan(
            [design.reference.label],
            ratios=ratios or ("0.75",),
            sinks=sinks,
            window=window,
            evaluate=evaluate,
            precision=precision,
            controls=False,
        ),
        layers,
        sequences,
    )
    missing = study.missing()
    if metric in missing:
        raise KvtoolError("trace-lacks", f"--metric {metric} cannot be measured: {missing[metric]}")
    with threads_for(study.work, threads):
        if notes is not None:
            notes(study.cost())
        if store is None:
            return study.result(measure(opened, study.groups, study.label, study.work, None, progress), metric)
        store.open([group.plan.identity(opened) for group in study.groups])
        finished = False
        try:
            found = measure(opened, study.groups, study.label, study.work, store, progress)
            result = study.result(found, metric)
            result.save(store.output)
            finished = True
        finally:
            store.close(finished=finished)
        return result


@dataclass(frozen=True, eq=False)
class Study:
    """A design on a trace, ready to be measured.

    Attributes:
        path: (what changed, the policy then) from CapKV to JaCap, as far as the trace serves it.
        beside: known policies for scale.
        covered: what the gradients of the sequences speak of.
    """

    trace: Trace
    design: Design
    groups: list[Group]
    work: Work
    path: list[tuple[str, Variant]]
    beside: list[Variant]
    warnings: list[str]
    covered: Coverages

    @property
    def label(self) -> str:
        return self.design.reference.label

    @property
    def plan(self) -> Plan:
        return self.groups[0].plan

    def missing(self) -> dict[str, str]:
        """Metric -> why the trace cannot serve it."""
        found = {}
        reason = over_sequences(self.covered.first()).missing
        reason = reason or next((one.missing for one in self.covered.first().values() if one.missing), None)
        if reason is not None:
            found["predicted_kl"] = reason
        if not all(sequence.layer(layer_id).has("output_projection") for sequence, layer_id, _ in self.work):
            found["mean_layer_error"] = "no output projection in some layer"
        return found

    def cost(self) -> str:
        """How much there is to do, in words."""
        dear: dict[str, set[str]] = {}
        for change in self.design.singles:
            if change.axis in ("selector", "blend"):
                alike = {v.label for changes, v in self.design.variants.items() if change in changes}
                dear[self.design.variants[(change,)].label] = alike
        about = seconds(self.groups, self.label, dear, self.work)
        points = sum(len(group.plan.policies) for group in self.groups)
        said = f"{about:.0f} s" if about < 90 else f"{about / 60:.0f} min"
        count = len(self.design.variants)
        return (
            f"{count} variants of {self.label}, {points} policies with those beside, on {len(self.work)} "
            f"(sequence, layer) pairs: about {said}"
        )

    def result(self, found: list[Found], metric: str | None) -> Result:
        """Tables, manifest and warnings."""
        cells: list[dict[str, Any]] = []
        effects: list[dict[str, Any]] = []
        pairs: list[dict[str, Any]] = []
        entries = {mine.group.protected: mine.cells(self.work, self.covered) for mine in found}
        served = [name for name in ORDERING if name not in self.missing()]
        for budget in self.plan.budgets:
            here = {"ratio": budget.ratio_number}
            cells += self._cells(entries, budget.ratio_number)
            for name in list(served):
                measured = self._measured(found, entries, name, self.plan.budgets.index(budget))
                if measured is None:
                    served.remove(name)
                    continue
                of = {**here, "metric": name}
                effects += [{**of, **entry} for entry in main_effects(self.design, measured)]
                effects += [{**of, **entry} for entry in steps(self.path, measured)]
                pairs += [{**of, **entry} for entry in interaction_entries(self.design, measured)]
                unit = unit_of(measured)
        if not served or (metric is not None and metric not in served):
            raise KvtoolError("trace-lacks", f"{metric or 'every metric'} is undefined for some variant")
        manifest = manifest_of(self.trace, self.plan, self.work)
        manifest["ablate"] = {
            "reference": self.label,
            "axes": self.design.own,
            "companion": None if self.design.companion is None else self.design.companion.level,
            "pairs": len(self.design.pairs),
            "variants": len(self.design.variants),
            "metric": metric or served[0],
            "metrics": served,
            "paired_over": unit,
            "protections": [group.protected for group in self.groups],
        }
        notes = [note for mine in found for note in mine.notes]
        warnings = [*self.warnings, *sentences(notes, 2, len(self.work))]
        tables = {
            "cells": table_of("cells", cells),
            "effects": table_of("effects", effects),
            "interactions": table_of("interactions", pairs),
        }
        return Result(manifest, tables, warnings, ABLATE)

    def _cells(self, entries: Mapping[str | None, list[dict[str, Any]]], ratio: float | None) -> list[dict[str, Any]]:
        """One entry per variant, path step and policy beside, and sequence, at one ratio."""
        lines = [(_KINDS[len(changes)], v, [c.level for c in changes]) for changes, v in self.design.variants.items()]
        lines += [("path", variant, [said]) for said, variant in self.path]
        lines += [("beside", variant, []) for variant in self.beside]
        found = []
        for kind, variant, changes in lines:
            for entry in entries[variant.protected]:
                if entry["policy"] == variant.label and entry["ratio"] == ratio:
                    found.append({**entry, "kind": kind, "changes": changes, "protected": variant.protected})
        return found

    def _measured(
        self, found: list[Found], entries: Mapping[str | None, list[dict[str, Any]]], metric: str, budget: int
    ) -> Measured | None:
        """One metric of every point at one budget; None where it is undefined somewhere."""
        layer_ids = sorted({layer_id for _, layer_id, _ in self.work})
        count = len(by_sequence(self.work))
        measured = {}
        for mine in found:
            budgets = len(mine.group.plan.budgets)
            for index, (label, _) in enumerate(mine.group.plan.policies):
                cell = index * budgets + budget
                first = cell * (count + 1)
                whole = [e[metric] for e in entries[mine.group.protected][first : first + count]]
                if any(value is None for value in whole):
                    return None
                measured[label, mine.group.protected] = mine.values(cell, metric, self.work, layer_ids, whole)
        return measured


_KINDS = ("reference", "single", "pair")


def _prepare(
    trace: Trace, design: Design, plan: Plan, layers: Iterable[int] | None, sequences: Iterable[int] | None
) -> Study:
    """The study without what the trace cannot serve, each left out with a note."""
    work = work_of(trace, plan, layers, sequences)
    path, beside = capkv_to_jacap(), [named(name) for name in BESIDE]
    wanted = [*design.variants.values(), *(variant for _, variant in path), *beside]
    served = dict(make_plan([variant.label for variant in wanted], controls=False).policies)
    donors = [(donor_of(sequence, sequence.layer(layer_id)), step) for sequence, layer_id, step in work]
    reasons = {}
    for label, policy in served.items():
        reason = next((r for donor, step in donors if (r := missing_for(policy, donor, step)) is not None), None)
        if reason is not None:
            reasons[label] = reason
    design = design.without(reasons)
    warnings = list(design.notes)
    if any(variant.label in reasons for _, variant in path):
        warnings.append("the path from capkv to jacap is left out: " + next(iter(reasons.values())))
        path = []
    warnings += [f"{v.label} is left out: {reasons[v.label]}" for v in beside if v.label in reasons]
    beside = [variant for variant in beside if variant.label not in reasons]
    points: dict[str | None, dict[str, None]] = {None: {}}
    for variant in [*design.variants.values(), *(variant for _, variant in path), *beside]:
        points.setdefault(variant.protected, {})[variant.label] = None
    groups = [
        Group(protected, replace(plan, policies=[(label, served[label]) for label in labels]))
        for protected, labels in points.items()
    ]
    return Study(trace, design, groups, work, path, beside, warnings, Coverages.of(trace, plan, work))
