"""Diff: two results, or two policies of one, set against each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtool.compare import findings
from kvtool.compare.columns import Columns, Compared, compared_columns
from kvtool.compare.comparison import Comparison, shown_groups
from kvtool.compare.group_entries import group_entries
from kvtool.compare.groups import checked_by, places_of
from kvtool.compare.kinds import IDENTICAL, NUMERICS, rolled_up
from kvtool.compare.pairs import Cell, common_sequences, other_blocks, unlike_layers
from kvtool.compare.sets import Sets, trace_of
from kvtool.compare.settings import differing_settings
from kvtool.compare.sides import Side, Source, matched, side_of
from kvtool.compare.statistics import interval_entry, note
from kvtool.compare.tolerance import Given, Tolerance
from kvtool.errors import KvtoolError
from kvtool.trace import Trace

SCHEMA = "kvtool.diff/1"
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, eq=False)
class Diff:
    """What two sides differ in. `document()` holds everything; docs/diff.md describes its fields.

    Attributes:
        contents: the JSON document `kvtool.diff/1`.
    """

    contents: dict[str, Any] = field(repr=False)

    @property
    def worse(self) -> bool:
        """Whether B is worse beyond the tolerance, or lacks what A has or means something else by it: exit code 1."""
        return bool(self.contents["worse"])

    @property
    def kind(self) -> str:
        """`identical`, `numerics`, `behaviour` or `unknown`."""
        return str(self.contents["kind"])

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The groups that differ."""
        return list(self.contents["groups"])

    @property
    def settings(self) -> list[dict[str, Any]]:
        """The parameters and versions that differ."""
        return list(self.contents["settings"])

    @property
    def findings(self) -> list[str]:
        """The differences in sentences, the most important first."""
        return list(self.contents["findings"])

    @property
    def warnings(self) -> list[str]:
        """What could not be compared."""
        return list(self.contents["warnings"])

    @property
    def empty(self) -> bool:
        """Whether there is no difference at all."""
        told = ("groups", "settings", "only_a", "only_b", "refused", "warnings")
        return self.kind == "identical" and not any(self.contents[name] for name in told)

    def document(self) -> dict[str, Any]:
        """The one JSON document that `--json` prints."""
        return self.contents


def diff(
    a: Source,
    b: Source,
    *,
    trace: str | Path | Trace | None = None,
    by: str | Iterable[str] = (),
    metrics: str | Iterable[str] = (),
    relative: Given = None,
    absolute: Given = None,
    tokens: int = 10,
    progress: Progress | None = None,
) -> Diff:
    """Set B against A, entry by entry.

    Prints nothing. Differences are B - A; a ratio is B / A.

    Args:
        a, b: folder of a result, `FOLDER::policy@0.75`, a Result, or (Result, selector).
        trace: what was replayed, for the text of tokens and what losing them costs; by default where A says it lies.
        by: places that groups are told apart by besides the cell: `event`, `sequence`, `layer`, `kv_head`, `q_head`.
            What decides is judged over whole runs all the same.
        metrics: columns or metrics to compare, each of which decides whether B is worse. None compares all; those of
            cells, output errors and layer errors decide, further columns of heads explain.
        relative, absolute: how far a number may move: a number, `METRIC=number` words or a mapping.
        tokens: most tokens to name per sequence and group, 0 for none.
        progress: told (groups done, all, what is being done).

    Raises:
        KvtoolError: bad input of any kind.
    """
    side_a, side_b, narrowed = matched(side_of(a, "A"), side_of(b, "B"))
    words = checked_by(by)
    places = places_of(words)
    metrics = [metrics] if isinstance(metrics, str) else list(metrics)
    columns = compared_columns(side_a, side_b, metrics, places)
    warnings = [*narrowed, *columns.warnings]
    tolerance = Tolerance.of(relative, absolute)
    tolerance.check(one.column.name for one in columns.compared)
    opened, missing = trace_of(side_a, side_b, trace)
    sequences = common_sequences(side_a, side_b)
    compared, unlike = _comparable(side_a, side_b, columns, sequences)
    warnings += unlike

    found = Comparison.of(side_a, side_b, compared, sequences)
    refused = [*columns.refused, *_other_predictions(side_a, side_b, found)]
    kinds = found.kinds(places)
    shown, identical = shown_groups(kinds, "event" in words)
    sets = Sets.of(side_a, side_b, found, opened, missing)
    groups = group_entries(found.only(shown, places), shown, kinds, places, tolerance, sets, tokens, progress)
    apart = bool(places) or "event" in words
    whole = _whole(found, groups, apart, tolerance, sets)
    if not found.decisions.margins_known and any(kind > 0 for kind in found.decisions.kind.tolist()):
        warnings.append("the results do not say how close their cuts were, so a change in ties counts as behaviour")
    only_a, only_b = _only(found, "only_a"), _only(found, "only_b")
    holes = _holes(found, side_a, side_b) or bool(refused) or any(group["lost"] for group in whole)
    worse = holes or any(e["verdict"] == "worse" and e["decides"] for group in whole for e in group["metrics"])
    settings = differing_settings(side_a, side_b)
    warnings += _trace_warnings(side_a, side_b, sequences)
    contents = {
        "schema": SCHEMA,
        "a": side_a.describe(),
        "b": side_b.describe(),
        "settings": settings,
        "kind": rolled_up(found.kinds(()).values()) if kinds else "unknown",
        "ties": int((found.decisions.kind == NUMERICS).sum()),
        "kept_sets": {"moved": int((found.decisions.kind != IDENTICAL).sum()), "of": len(found.decisions.kind)},
        "tolerance": tolerance.describe(),
        "by": list(words),
        "sequences": len(sequences),
        "interval": interval_entry(len(sequences)),
        "interval_note": note(len(sequences)) if sequences else "no sequence is in both",
        "identical_groups": identical,
        "groups": groups,
        "whole": whole if apart else None,
        "only_a": only_a,
        "only_b": only_b,
        "worse": bool(worse),
        "refused": refused,
        "findings": [*refused, *_findings(whole, only_a, only_b)],
        "warnings": warnings,
    }
    return Diff(contents)


def _comparable(a: Side, b: Side, columns: Columns, sequences: list[int]) -> tuple[list[Compared], list[str]]:
    """The columns without means over layers where A and B were measured on others, and a sentence about that.

    Raises:
        KvtoolError: code `usage` where nothing is left.
    """
    if not unlike_layers(a, b, sequences):
        return columns.compared, []
    kept = [one for one in columns.compared if one.column.level != "cell" and not one.column.share]
    ids = " and ".join(str(side.result.manifest["layers"]["text"]) for side in (a, b))
    said = f"A and B were measured on other layers ({ids}), so means over layers and shares of them are not compared"
    if not kept:
        raise KvtoolError("usage", said, "compare layer_error or output_error, or replay the same layers")
    return kept, [said]


def _other_predictions(a: Side, b: Side, found: Comparison) -> list[str]:
    """A sentence where predictions were left out since they speak of something else."""
    named = any(one.predicts for one in found.values["cells"])
    if not named or not bool(other_blocks(a, b, "cells", found.pairs["cells"]).any()):
        return []
    return [
        "predicted_kl is not compared where its gradients were cut into blocks of another length, or speak of another "
        "part of the model"
    ]


def _whole(
    found: Comparison, told: list[dict[str, Any]], apart: bool, tolerance: Tolerance, sets: Sets
) -> list[dict[str, Any]]:
    """The groups that decide, whatever the `told` ones are told `apart` by: whole runs of cells, and their events
    where a whole run hides that one moved."""
    if not apart:
        return told
    kinds = found.kinds(())
    moved, _ = shown_groups(kinds, events=False)
    return group_entries(found.only(moved, ()), moved, kinds, (), tolerance, sets, 0)


def _only(found: Comparison, side: str) -> list[dict[str, Any]]:
    """Entries of one side without a partner, by cell, event, sequence and table."""
    entries = []
    for table, pairs in found.everything():
        lone: dict[tuple[Cell, int | None, int], int] = getattr(pairs, side)
        for (cell, event, sequence), rows in lone.items():
            key = {"policy": cell.policy, "ratio": cell.ratio, "budget": cell.budget, "schedule": cell.schedule}
            entries.append({**key, "event": event, "sequence": sequence, "table": table, "rows": rows})
    return entries


def _holes(found: Comparison, a: Side, b: Side) -> bool:
    """Whether B lacks entries that it should have. Cells that were selected to be different ones may have their
    events at different steps."""
    unlike = any(a.pins.get(name) != b.pins.get(name) for name in a.pins.keys() & b.pins.keys())
    return any(event is None or not unlike for _, pairs in found.everything() for _, event, _ in pairs.only_a)


def _trace_warnings(a: Side, b: Side, sequences: list[int]) -> list[str]:
    digests = [side.result.manifest["trace"]["digest"] for side in (a, b)]
    if digests[0] == digests[1]:
        return []
    compared = "1 sequence of equal prompt and length is" if len(sequences) == 1 else ""
    compared = compared or f"{len(sequences)} sequences of equal prompt and length are"
    return [f"A and B come from different traces: {compared} compared, and a difference may be the text's"]


def _findings(groups: list[dict[str, Any]], only_a: list[dict[str, Any]], only_b: list[dict[str, Any]]) -> list[str]:
    by_kind = sorted(groups, key=lambda group: findings.SEVERITY[group["kind"]])
    kinds = [findings.kind_sentence(group, group["first"]) for group in by_kind]
    lost = [
        f"missing: {findings.name_of(group)} has no {', '.join(group['lost'])} in B where A has"
        for group in groups
        if group["lost"]
    ]
    said = [
        *findings.capped(findings.hole_sentences(only_a, "A"), "cells only in A"),
        *findings.capped(lost, "groups with missing numbers"),
        *findings.capped(kinds, "groups that differ"),
    ]
    for verdict in ("worse", "better"):
        said += findings.capped(findings.metric_sentences(groups, verdict), f"groups that are {verdict}")
    return said + findings.capped(findings.hole_sentences(only_b, "B"), "cells only in B")
