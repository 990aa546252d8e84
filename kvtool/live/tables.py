"""Tables: outcomes of a live run as the entries of a Result."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch

from kvtool.layer import Geometry
from kvtool.live.answer import Answer
from kvtool.live.loop import Outcome
from kvtool.live.timeline import spans_of, timeline_entries
from kvtool.metrics import nullable
from kvtool.replay.counts import achieved_of, counts_of
from kvtool.replay.decisions import decision_entries
from kvtool.replay.notes import without_effect
from kvtool.replay.plan import Cell, Plan
from kvtool.retained import RetainedSet
from kvtool.trace import Sequence
from kvtool.words import asked

SCORES = ("measured_kl", "measured_kl_max", "measured_kl_targets", "delta_nll", "top1_agreement")
MEASURED = ("measured_kl", "measured_kl_max", "delta_nll", "top1_agreement")
SUMS = ("evicted", "fallbacks")  # of a cell, over its layers
Entries = dict[str, list[dict[str, Any]]]


def blank_tables() -> Entries:
    """No entries yet."""
    return {name: [] for name in ("cells", "layers", "rows", "steps", "calibration", "evict_steps", "spans")}


@dataclass(frozen=True, eq=False)
class Ran:
    """One cell of one sequence.

    Attributes:
        retained: what was evicted, by layer.
        geometries: of these layers.
        foreseen: what the trace decided, where the run decided for itself; else None.
    """

    cell: Cell
    outcome: Outcome
    retained: dict[int, RetainedSet]
    geometries: dict[int, Geometry]
    foreseen: dict[int, RetainedSet] | None = None

    def differing(self, layer: int) -> tuple[int, int] | None:
        """How many (KV head, token) pairs of a layer leave at another step than the trace decided, of how many."""
        if self.foreseen is None:
            return None
        differ = self.retained[layer].evict_step != self.foreseen[layer].evict_step
        return int(differ.sum()), differ.numel()


def add_outcome(tables: Entries, plan: Plan, ran: Ran, sequence: Sequence, first: int, answer: Answer | None) -> None:
    """One cell of one sequence, into every table; `first` is the first evaluated step."""
    cell, retained, outcome = ran.cell, ran.retained, ran.outcome
    achieved = {layer: achieved_of(decided)["achieved"] for layer, decided in retained.items()}
    key = {"sequence": sequence.index, **cell.key(plan), "event": None}
    counts = {layer: counts_of(decided, sequence.length) for layer, decided in retained.items()}
    ties = {layer: sum(int(event.ties.sum()) for event in decided.events) for layer, decided in retained.items()}
    candidates = {layer: counted["candidates"] for layer, counted in counts.items()}
    missing = {layer: without_effect(cell, kept, ran.geometries[layer]) is not None for layer, kept in retained.items()}
    differing = {layer: ran.differing(layer) for layer in retained}
    errors = outcome.layers
    heads = [error.output_error for error in errors.values()]
    layers = [error.layer_error for error in errors.values()]
    tables["cells"].append(
        {
            **key,
            "achieved": _known_mean(achieved),
            "oracle": cell.policy.oracle,
            "candidates": _known_mean(candidates),
            **{name: sum(one[name] for one in counts.values()) for name in SUMS},
            "no_effect": all(missing.values()),
            "decisions_differ": _share(list(differing.values())),
            "events": _known_mean({layer: one["events"] for layer, one in counts.items()}),
            "ties": sum(ties.values()),
            **_measured(sequence, first, outcome),
            **(dict.fromkeys(SCORES) if all(missing.values()) else {}),
            **_answered(first, outcome, answer),
            "closed_layer_error": _mean(torch.tensor(layers)) if layers else None,
            "closed_output_error": _mean(torch.cat(heads)) if heads else None,
        }
    )
    for layer, decided in retained.items():
        place = {**key, "achieved": achieved[layer], "layer": layer}
        found = errors.get(layer)
        tables["layers"].append(
            {
                **place,
                "candidates": candidates[layer],
                "ties": ties[layer],
                **{name: counts[layer][name] for name in ("events", *SUMS)},
                "no_effect": missing[layer],
                "decisions_differ": _share([differing[layer]]),
                "closed_layer_error": None if found is None else found.layer_error,
                "closed_output_error": None if found is None else _mean(found.output_error),
            }
        )
        if found is not None:
            per_kv_head = found.output_error.numel() // decided.evict_step.shape[0]
            tables["rows"] += [
                {**place, "kv_head": head // per_kv_head, "q_head": head, "closed_output_error": value}
                for head, value in enumerate(nullable(found.output_error))
            ]
        tables["evict_steps"] += decision_entries(place, decided, ran.geometries[layer])
    key["achieved"] = _known_mean(achieved)
    tables["steps"] += _steps(key, sequence, first, outcome)
    tables["spans"] += timeline_entries(
        key,
        spans_of(cell.schedule, sequence, retained),
        first,
        outcome.predictions,
        _predicted(sequence, first),
        retained,
        ran.geometries,
    )


def _share(counted: list[tuple[int, int] | None]) -> float | None:
    known = [pair for pair in counted if pair is not None]
    return sum(some for some, _ in known) / sum(of for _, of in known) if known else None


def _known_mean(values: Mapping[int, float | None]) -> float | None:
    known = [value for value in values.values() if value is not None and not math.isnan(value)]
    return fmean(known) if known else None


def _mean(values: torch.Tensor) -> float | None:
    known = values[~values.isnan()]
    return float(known.mean()) if known.numel() else None


def _measured(sequence: Sequence, event: int, outcome: Outcome) -> dict[str, Any]:
    """Means over the evaluated steps, those of an appended answer left out.

    A step whose predictions are no numbers makes every mean that holds it null: what is left would speak of
    the harmless steps only.
    """
    found = outcome.predictions
    kl, agree = found.kl[: sequence.length - event], found.agree[: sequence.length - event]
    lost = (found.nll_evicted - found.nll_full)[: sequence.length - 1 - event]
    undefined = int(kl.isnan().sum())
    drawn = kl[_predicted(sequence, event)]
    return {
        "evaluated_steps": kl.numel(),
        "undefined_steps": undefined,
        "measured_kl": _whole(kl),
        "measured_kl_max": None if undefined else float(kl.max()),
        "measured_kl_targets": _whole(drawn),
        "delta_nll": _whole(lost),
        "nll_full": _whole(found.nll_full[: lost.numel()]),
        "top1_agreement": None if undefined else float(agree.to(torch.float64).mean()),
    }


def _whole(values: torch.Tensor) -> float | None:
    """The mean, None where there is nothing or a NaN among it."""
    return float(values.mean()) if values.numel() and not bool(values.isnan().any()) else None


def _predicted(sequence: Sequence, event: int) -> torch.Tensor:
    """[n] bool over the steps from the event on: those that `predicted_kl` speaks of, where something was drawn
    and every layer with gradients has a query."""
    steps = torch.arange(event, sequence.length)
    gradients = sequence.gradients
    if gradients is None:
        return torch.zeros(steps.numel(), dtype=torch.bool)
    found = (steps >= gradients.targets[0]) & (steps < gradients.targets[1])
    for layer in sequence.layer_ids:
        if sequence.has_array("output_gradients", layer):
            found &= torch.isin(steps, sequence.query_steps(layer).to(torch.int64))
    return found


def _answered(event: int, outcome: Outcome, answer: Answer | None) -> dict[str, Any]:
    """Likelihood of the answer, nats per token."""
    if answer is None:
        return dict.fromkeys(("answer_nll_full", "answer_nll", "answer_loss"))
    span = slice(answer.low - 1 - event, answer.high - 1 - event)
    full, evicted = (_whole(nll[span]) for nll in (outcome.predictions.nll_full, outcome.predictions.nll_evicted))
    lost = None if full is None or evicted is None else evicted - full
    return {"answer_nll_full": full, "answer_nll": evicted, "answer_loss": lost}


def _steps(key: dict[str, Any], sequence: Sequence, event: int, outcome: Outcome) -> list[dict[str, Any]]:
    found = outcome.predictions
    known = sequence.length - 1 - event  # the last row predicts a token that the trace does not hold
    entries = []
    for index in range(sequence.length - event):
        known_next = index < known
        entries.append(
            {
                **key,
                "step": event + index,
                "kl": float(found.kl[index]),  # NaN becomes null
                "top1_agrees": None if bool(found.kl[index].isnan()) else bool(found.agree[index]),
                "nll_full": float(found.nll_full[index]) if known_next else None,
                "nll": float(found.nll_evicted[index]) if known_next else None,
            }
        )
    return entries


def means(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For every cell the mean over its sequences, `sequence` null, as replay takes it; steps are added up, and texts
    belong to one sequence only."""
    groups: dict[tuple, list[dict[str, Any]]] = {}
    for cell in cells:
        groups.setdefault((cell["policy"], cell["ratio"], cell["budget"], cell["schedule"]), []).append(cell)
    found = []
    for members in groups.values():
        mean = dict(members[0], sequence=None)
        for column, value in mean.items():
            if column in ("sequence", "policy", "ratio", "budget", "schedule", "evaluate", "event", "oracle"):
                continue
            known = [m[column] for m in members if m[column] is not None]
            partly = column in MEASURED and len(known) < len(members)  # a mean over the harmless ones would flatter
            if column == "no_effect":
                mean[column] = all(m[column] for m in members)
            elif isinstance(value, str) or not known or isinstance(known[0], str) or partly:
                mean[column] = None
            else:
                mean[column] = sum(known) if column in ("evaluated_steps", "undefined_steps") else fmean(known)
        found.append(mean)
    return found


def undefined(tables: Entries) -> list[str]:
    """A sentence for every cell in which the model's predictions were no numbers."""
    return [
        f"{cell['policy']} at {asked(cell['ratio'], cell['budget'])}, sequence {cell['sequence']}: the predictions of "
        f"{cell['undefined_steps']} of {cell['evaluated_steps']} steps are not finite, so nothing is measured there; "
        "--model-dtype float32 may hold them"
        for cell in tables["cells"]
        if cell["sequence"] is not None and cell["undefined_steps"]
    ]
