"""Notes: what a reader of the numbers must know, gathered from all units into a few sentences."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Literal

import torch

from kvtool.layer import Geometry
from kvtool.replay.plan import Cell
from kvtool.retained import RetainedSet

NONE = torch.zeros(1)
SAID = {
    "no-effect": "had no effect in {where}: the budget covers every candidate",
    "jitter": "needed a raised diagonal to factor a matrix in {where}; the column `jitter` says by how much",
    "fallback": "could not factor a matrix in {where}, so the declared fallback scored there (column `fallback`)",
    "knorm": "could not factor a matrix in {where} and its fallback was not finite either, so key norms scored there",
}
Kind = Literal["overfull", "no-effect", "jitter", "fallback", "knorm"]


def note_unit(cell: Cell, retained: RetainedSet, donor: Geometry, sequence: int, layer: int) -> list[dict[str, Any]]:
    """The notes on one cell of one unit, as plain values; `donor` is the layer that was scored."""
    (event,) = retained.events
    kinds: list[Kind] = []
    if event.overfull:
        kinds.append("overfull")
    asked = cell.budget.ratio is None or cell.budget.ratio > 0
    if asked and not cell.policy.skips(donor) and bool((retained.evict_step == retained.tokens).all()):
        kinds.append("no-effect")
    if bool((event.diagnostics.get("jitter", NONE) > 0).any()):
        kinds.append("jitter")
    fallback = event.diagnostics.get("fallback", NONE)
    if bool((fallback == 1).any()):
        kinds.append("fallback")
    if bool((fallback == 2).any()):
        kinds.append("knorm")
    return [
        {
            "kind": kind,
            "policy": cell.label,
            "asked": f"ratio {cell.budget}" if cell.budget.ratio is not None else f"budget {cell.budget.tokens}",
            "allowed": int(event.budget.min()),
            "sequence": sequence,
            "layer": layer,
        }
        for kind in kinds
    ]


def sentences(notes: list[dict[str, Any]], policies: int, units: int) -> list[str]:
    """One sentence per kind and budget.

    Args:
        policies: how many policies could have been noted (all but those that keep everything).
        units: how many (sequence, layer) pairs were replayed.
    """
    grouped: dict[tuple[str, str], dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for note in notes:
        grouped[note["kind"], note["asked"]][note["policy"]].append(note)
    said = []
    for (kind, asked), by_policy in grouped.items():
        alike: dict[frozenset[tuple[int, int]], list[str]] = defaultdict(list)
        for policy, members in by_policy.items():
            alike[frozenset((m["sequence"], m["layer"]) for m in members)].append(policy)
        for places, names in alike.items():
            who = "every policy" if len(names) == policies else ", ".join(names)
            where = f"{len(places)} of {units} (sequence, layer) pairs"
            if kind == "overfull":
                allowed = [m["allowed"] for name in names for m in by_policy[name]]
                tokens = f"{min(allowed)}" if min(allowed) == max(allowed) else f"{min(allowed)} to {max(allowed)}"
                said.append(
                    f"{asked}: protection exceeds the budget of {tokens} tokens for {who} in {where}; "
                    "sinks were kept first, then the newest, so scores decided nothing there"
                )
            else:
                said.append(f"{asked}: {who} {SAID[kind].format(where=where)}")
    return said
