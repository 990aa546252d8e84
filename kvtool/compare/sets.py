"""Sets: the kept sets of the groups that decided otherwise, and the trace that says what their tokens are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvtool.compare.comparison import Comparison
from kvtool.compare.groups import Key, group_ids
from kvtool.compare.kept import HeadSets, overlap
from kvtool.compare.kinds import IDENTICAL, Decisions
from kvtool.compare.lost_tokens import lost_tokens
from kvtool.compare.pairs import NONE
from kvtool.compare.sides import Side
from kvtool.errors import KvtoolError
from kvtool.trace import Trace, open_trace
from kvtool.words import printable


@dataclass(frozen=True, eq=False)
class Sets:
    """The decisions of all groups.

    Attributes:
        decisions: head by head.
        evaluated_from: (row of A, row of B) of `layers` by cell, sequence and layer: the first evaluated step.
        prompts: sequence -> rows of its prompt.
        trace: None where it is not at hand, `missing` says why.
    """

    decisions: Decisions
    evaluated_from: dict[tuple[int, ...], int]
    prompts: dict[int, int | None]
    trace: Trace | None
    missing: str | None

    @classmethod
    def of(cls, a: Side, b: Side, found: Comparison, trace: Trace | None, missing: str | None) -> Sets:
        pairs = found.pairs["layers"]
        cells = {cell: index for index, cell in enumerate(found.decisions.pairs.cells)}
        starts: dict[tuple[int, ...], int] = {}
        begun = [_started(side, rows) for side, rows in ((a, pairs.rows_a), (b, pairs.rows_b))]
        for index in np.flatnonzero(pairs.event == NONE).tolist():
            steps = [side[index] for side in begun if side is not None and not np.isnan(side[index])]
            cell = cells.get(pairs.cells[int(pairs.cell[index])])
            if steps and cell is not None:
                starts[(cell, int(pairs.sequence[index]), int(pairs.layer[index]))] = int(min(steps))
        said = a.result.manifest["sequences"]
        prompts = dict(zip(said["indices"], said["prompt_lengths"], strict=True))
        return cls(found.decisions, starts, prompts, trace, missing)

    def members(self, places: Sequence[str]) -> dict[Key, list[int]]:
        """Group -> its entries in the decisions; a query head's are those of its KV head."""
        ids, known = group_ids(self.decisions.pairs, [place for place in places if place != "q_head"])
        order = np.argsort(ids, kind="stable")
        bounds = np.searchsorted(ids[order], np.arange(len(known) + 1))
        return {key: order[bounds[index] : bounds[index + 1]].tolist() for key, index in known.items()}

    def head(self, index: int) -> HeadSets | None:
        """One entry as kept sets; None where the sides cannot be laid over each other."""
        pairs, decisions = self.decisions.pairs, self.decisions
        if decisions.a is None or decisions.b is None:
            return None
        a, b = decisions.steps(index)
        sequence, layer = int(pairs.sequence[index]), int(pairs.layer[index])
        if len(a) != len(b):
            return None
        last, oldest = decisions.last_event(index) or (None, 0)
        begun = self.evaluated_from.get((int(pairs.cell[index]), sequence, layer), len(a) if last is None else last)
        return HeadSets(
            sequence,
            layer,
            int(pairs.kv_head[index]),
            torch.from_numpy(a.astype(np.int32)),
            torch.from_numpy(b.astype(np.int32)),
            self.prompts.get(sequence),
            begun,
            last_event=last,
            oldest=oldest,
        )

    def told(self, members: list[int], limit: int) -> dict[str, Any]:
        """`kept` and `tokens` of one group; null where no head of it decided otherwise."""
        if all(self.decisions.kind[index] == IDENTICAL for index in members):
            return {"kept": None, "tokens": None}
        heads = [head for index in members if (head := self.head(index)) is not None]
        tokens: dict[str, Any] = {"lost": [], "gained": [], "not_told": "no tokens were asked for"}
        if limit > 0:
            tokens = lost_tokens(self.trace, heads, limit=limit)
            tokens["not_told"] = self.missing or tokens["not_told"]
        return {"kept": overlap(heads), "tokens": tokens}

    def first_lost(self, members: list[int]) -> str | None:
        """The first token that A keeps and B loses, or the other way round, as a sentence's end."""
        pairs = self.decisions.pairs
        moved = [index for index in members if self.decisions.kind[index] != IDENTICAL]
        moved.sort(key=lambda i: (int(pairs.sequence[i]), int(pairs.layer[i]), int(pairs.kv_head[i])))
        for verb, sign in (("loses", 1), ("keeps", -1)):
            for index in moved:
                head = self.head(index)
                rows = [] if head is None else ((head.a - head.b) * sign > 0).nonzero()[:1, 0].tolist()
                if head is not None and rows:
                    where = f"sequence {head.sequence}, layer {head.layer}, KV head {head.kv_head}"
                    return f"{where} {verb} token {rows[0]}{self._text(head.sequence, rows[0])}"
        return None

    def _text(self, sequence: int, row: int) -> str:
        run = None if self.trace is None else next((r for r in self.trace.sequences if r.index == sequence), None)
        if run is None or not run.has_array("text"):
            return ""
        return f" '{printable(run.text(row))}'"


def _started(side: Side, rows: Any) -> Any:
    table = side.result.tables["layers"]
    if "evaluated_from" not in table.column_names:
        return None
    return np.asarray(table.column("evaluated_from").to_numpy(), dtype=np.float64)[rows]


def trace_of(a: Side, b: Side, given: str | Path | Trace | None) -> tuple[Trace | None, str | None]:
    """The trace that was replayed, or why it is not at hand.

    Without `given` it is looked for where the results say that it was.

    Raises:
        KvtoolError: what opening the trace that was named says, or `usage` for another trace than A's and B's.
    """
    digests = [side.result.manifest["trace"]["digest"] for side in (a, b)]
    if given is not None:
        trace = given if isinstance(given, Trace) else open_trace(given)
        if trace.digest not in digests:
            raise KvtoolError("usage", f"{trace.shown} is not the trace of either result", "name the one replayed")
        return trace, None
    for side in (a, b):
        said = side.result.manifest["trace"]
        path = said.get("path")
        if path is None or not Path(path).is_dir():
            continue
        try:
            trace = open_trace(path)
        except KvtoolError:
            continue
        if trace.digest == said["digest"]:
            return trace, None
    where = a.result.manifest["trace"].get("path")
    return None, f"the trace is not at {where}: no text, no attention, no damage (name it with --trace)"
