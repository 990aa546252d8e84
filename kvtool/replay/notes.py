"""Notes: what a reader of the numbers must know, gathered from all units into a few sentences."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Literal

from torch import Tensor

from kvtool.layer import Geometry
from kvtool.replay.events import MOST_EVENTS
from kvtool.replay.plan import Cell
from kvtool.retained import DEADLINE, FACTORISATION, RetainedSet

SAID = {
    "no-effect": "had no effect in {where}: the budget covers every candidate",
    "pages": "had no effect in {where}: no page could leave as a whole, and one that is being filled never does",
    "never-ran": "had no effect in {where}: the schedule never made an event due",
    "page-filling": "kept more than the budget at some events in {where}: protected pages stay, and so does the page "
    "being filled",
    "window": "could not factor a matrix at some events in {where}, so the sliding window decided there (column "
    "`fallbacks`)",
    "deadline": "exceeded --deadline-ms at some events in {where}, so the sliding window decided there (column "
    "`deadline_fallbacks`); a run again may decide otherwise",
    "jitter": "needed a raised diagonal to factor a matrix in {where}; the column `jitter` says by how much",
    "fallback": "could not factor a matrix in {where}, so the declared fallback scored there (column `fallback`)",
    "knorm": "could not factor a matrix in {where} and its fallback was not finite either, so key norms scored there",
}
Kind = Literal[
    "thinned",
    "overfull",
    "page-filling",
    "no-effect",
    "pages",
    "never-ran",
    "window",
    "deadline",
    "jitter",
    "fallback",
    "knorm",
]


def note_unit(cell: Cell, retained: RetainedSet, donor: Geometry, sequence: int, layer: int) -> list[dict[str, Any]]:
    """The notes on one cell of one unit, as plain values; `donor` is the layer that was scored."""
    events = retained.events
    kinds: list[Kind] = []
    overfull = [event for event in events if event.overfull]
    if overfull:
        kinds.append("page-filling" if cell.schedule.block > 1 else "overfull")
    reason = without_effect(cell, retained, donor)
    if reason is not None:
        kinds.append(reason)
    if any(value > 0 for value in _said([event.diagnostics.get("jitter") for event in events])):
        kinds.append("jitter")
    if not cell.schedule.repeats:  # under several events the window decides instead
        declared = _said([event.diagnostics.get("fallback") for event in events])
        kinds += ["fallback"] * (1 in declared)
        kinds += ["knorm"] * (2 in declared)
    instead = _said([event.fallback for event in events])
    kinds += ["window"] * (FACTORISATION in instead)
    kinds += ["deadline"] * (DEADLINE in instead)
    return [
        {
            "kind": kind,
            "policy": cell.label,
            "schedule": str(cell.schedule) if cell.schedule.repeats else None,
            "asked": f"ratio {cell.budget}" if cell.budget.ratio is not None else f"budget {cell.budget.tokens}",
            "allowed": min((int(event.budget.min()) for event in overfull), default=0),
            "at": [len(overfull), len(events)],
            "sequence": sequence,
            "layer": layer,
        }
        for kind in kinds
    ]


def _said(of_events: list[Tensor | None]) -> set[float]:
    """Every value that any event says of any head."""
    return {value for values in of_events if values is not None for value in values.tolist()}


def note_thinned(decided: list[RetainedSet], sequence: int, layer: int) -> list[dict[str, Any]]:
    """The note that not every event of a layer has an entry in the table `events`."""
    if sum(len(retained.events) for retained in decided) <= MOST_EVENTS:
        return []
    return [
        {
            "kind": "thinned",
            "policy": "",
            "schedule": None,
            "asked": f"table events, layer {layer} of sequence {sequence}",
            "allowed": 0,
            "at": [0, 0],
            "sequence": sequence,
            "layer": layer,
        }
    ]


def without_effect(
    cell: Cell, retained: RetainedSet, donor: Geometry
) -> Literal["no-effect", "pages", "never-ran"] | None:
    """Why a policy that was asked to evict did not; None where it did, or where nothing was asked of it."""
    asked = cell.budget.ratio is None or cell.budget.ratio > 0
    if not asked or cell.policy.skips(donor) or bool((retained.evict_step < retained.tokens).any()):
        return None
    if not retained.events:
        return "never-ran"
    beyond = any(e.found is not None and bool((e.found > e.budget).any()) for e in retained.events)
    return "pages" if beyond else "no-effect"


def sentences(notes: list[dict[str, Any]], policies: int, units: int) -> list[str]:
    """One sentence per kind and budget.

    Args:
        policies: how many policies could have been noted (all but those that keep everything).
        units: how many (sequence, layer) pairs were replayed.
    """
    grouped: dict[tuple[str, str], dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for note in notes:
        asked = note["asked"] if note["schedule"] is None else f"{note['asked']}, {note['schedule']}"
        grouped[note["kind"], asked][note["policy"]].append(note)
    said = []
    for (kind, asked), by_policy in grouped.items():
        alike: dict[frozenset[tuple[int, int]], list[str]] = defaultdict(list)
        for policy, members in by_policy.items():
            alike[frozenset((m["sequence"], m["layer"]) for m in members)].append(policy)
        for places, names in alike.items():
            if kind == "thinned":
                said.append(f"{asked}: more than {MOST_EVENTS:,} events, so entries stand for evenly spaced ones only")
                continue
            who = "every policy" if len(names) == policies else ", ".join(names)
            where = f"{len(places)} of {units} (sequence, layer) pairs"
            if kind == "overfull":
                allowed = [m["allowed"] for name in names for m in by_policy[name]]
                tokens = f"{min(allowed)}" if min(allowed) == max(allowed) else f"{min(allowed)} to {max(allowed)}"
                counts = [m["at"] for name in names for m in by_policy[name]]
                some, of = sum(count for count, _ in counts), sum(count for _, count in counts)
                at = "" if some == of else f" at {some} of {of} events"
                said.append(
                    f"{asked}: protection exceeds the budget of {tokens} tokens for {who}{at} in {where}; "
                    "first rows were kept first, then the newest, so scores decided nothing there"
                )
            else:
                said.append(f"{asked}: {who} {SAID[kind].format(where=where)}")
    return said
