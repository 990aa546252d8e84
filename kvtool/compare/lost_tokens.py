"""Lost tokens: which tokens one run keeps and the other does not, and what each of them alone is worth."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvtool.compare.kept import HeadSets
from kvtool.errors import KvtoolError
from kvtool.kernels.retained_attention.leave_one_out import LeftOut, leave_one_out
from kvtool.layer import Layer
from kvtool.trace import Sequence as Run
from kvtool.trace import Trace

NO_TRACE = "without the trace there are rows only: no text, no attention, no damage (name it with --trace)"


@dataclass(eq=False)
class _Tally:
    """What heads say of the tokens of one sequence that moved one way, [T] each.

    Attributes:
        heads: heads that lose the token.
        damaged, damage, squared: heads with a defined damage, the sum over them, and the sum of squares.
        asked, mass: heads with a query that misses the token, and the sum over them of its mean share of attention.
        worst: the largest damage to one query head; NaN where there is none.
        place: [T, 3] layer, KV head and query head of it.
        of_head: (layer, which tokens that head loses).
    """

    heads: Tensor
    damaged: Tensor
    damage: Tensor
    squared: Tensor
    asked: Tensor
    mass: Tensor
    worst: Tensor
    place: Tensor
    of_head: list[tuple[int, Tensor]] = field(default_factory=list)

    @classmethod
    def of(cls, tokens: int) -> _Tally:
        counts = [torch.zeros(tokens, dtype=torch.int64) for _ in range(3)]
        sums = [torch.zeros(tokens, dtype=torch.float64) for _ in range(4)]
        sums[3].fill_(math.nan)
        place = torch.full((tokens, 3), -1, dtype=torch.int64)
        return cls(counts[0], counts[1], sums[0], sums[1], counts[2], sums[2], sums[3], place)

    def add(self, layer: int, lost: Tensor) -> None:
        """A head of `layer` loses these tokens, [T] bool."""
        self.heads += lost
        self.of_head.append((layer, lost))

    def measure(self, head: HeadSets, lost: Tensor, found: LeftOut) -> None:
        """What it costs that head; `found` speaks of it alone."""
        total, group = float(found.squared_output.sum()), found.squared_output.numel()
        seen = found.seen[0]
        asked = lost & (seen > 0)
        self.asked += asked
        self.mass += torch.where(asked, found.mass.sum(0) / (seen.clamp_min(1) * group), 0.0)
        if not total:
            return  # relative to nothing
        damage = (found.squared_error.sum(0) / total).sqrt()
        self.damaged += lost
        self.damage += torch.where(lost, damage, 0.0)
        self.squared += torch.where(lost, damage.square(), 0.0)
        for q_head, output in enumerate(found.squared_output.tolist()):
            if not output:
                continue
            mine = (found.squared_error[q_head] / output).sqrt()
            worse = lost & ~(self.worst >= mine)  # the first of equals stays
            self.worst = torch.where(worse, mine, self.worst)
            self.place[worse] = torch.tensor([head.layer, head.kv_head, head.kv_head * group + q_head])


def lost_tokens(
    trace: Trace | None, heads: Sequence[HeadSets], *, limit: int, precision: torch.dtype = torch.float64
) -> dict[str, Any]:
    """The tokens that A keeps longer than B (`lost`) and the other way round (`gained`), the dearest first.

    A token is missing at the evaluated steps (from `evaluated_from` on, with a stored query that sees it) at which one
    side still has it and the other has not. Its damage there is the error of losing it alone, all other tokens kept:
    |a_j/(1-a_j) (v_j - f)| (docs/metrics.md), root-sum-square over those steps and the group's query heads, over the
    root-sum-square of |f| at all evaluated steps: what `output_error` would be if nothing else had been evicted.

    Args:
        trace: where both runs come from; None tells rows only.
        heads: every head that was compared, also those without a difference.
        limit: most entries of each list, per sequence.
        precision: float64 or float32.

    Returns:
        `lost` and `gained`, by sequence, in it by the sum of damages over heads, descending; and `not_told`, a sentence
        about what is missing, None where nothing is. An entry has `sequence`, `token` (row), `position`, `text`
        (as the trace holds it: print it through kvtool.words.printable), `heads` (layers x KV heads that lose it),
        `of` (heads compared), `layers`, `attention_mass` (share of attention of the queries that miss it, mean over
        those heads), `damage` (relative L2, root mean square over those heads) and `worst`, the query head that it
        hurts most. Null is what a missing trace, or a token that no query would have read, leaves untold.

    Raises:
        KvtoolError: code `usage` for a trace that is not the one of the heads, `not-finite` for NaN in it.
    """
    by_sequence: dict[int, list[HeadSets]] = defaultdict(list)
    for head in heads:
        by_sequence[head.sequence].append(head)
    runs = {} if trace is None else {run.index: run for run in trace.sequences}
    answer: dict[str, Any] = {"lost": [], "gained": [], "not_told": None if trace is not None else NO_TRACE}
    for index, mine in sorted(by_sequence.items()):
        differing = [head for head in mine if head.differs]
        if not differing:
            continue
        run = None if trace is None else _run(trace, runs, index, mine[0].tokens)
        lost, gained = (_Tally.of(mine[0].tokens) for _ in range(2))
        layer: Layer | None = None
        for head in sorted(differing, key=lambda one: (one.layer, one.kv_head)):
            if run is not None and (layer is None or layer.geometry.layer != head.layer):
                layer = _layer(run, head, precision)
            _add(layer, head, lost, gained)
        for name, tally in (("lost", lost), ("gained", gained)):
            answer[name] += _entries(run, index, tally, len(mine), limit)
    return answer


def _run(trace: Trace, runs: dict[int, Run], index: int, tokens: int) -> Run:
    if index not in runs or runs[index].length != tokens:
        what = "has no such sequence" if index not in runs else f"has {runs[index].length}"
        raise KvtoolError(
            "usage",
            f"sequence {index} of the results has {tokens} tokens, and {trace.shown} {what}",
            "name the trace that was replayed",
        )
    return runs[index]


def _layer(run: Run, head: HeadSets, precision: torch.dtype) -> Layer:
    layer = run.layer(head.layer, dtype=precision)
    if head.kv_head >= layer.geometry.kv_heads:
        raise KvtoolError(
            "usage",
            f"the results speak of KV head {head.kv_head} of layer {head.layer}, which has {layer.geometry.kv_heads}",
            "name the trace that was replayed",
        )
    return layer


def _add(layer: Layer | None, head: HeadSets, lost: _Tally, gained: _Tally) -> None:
    """One head into both tallies; both ways are measured in one pass."""
    ways = ((lost, head.b < head.a), (gained, head.a < head.b))
    found = None if layer is None else _left_out(layer, head)
    for tally, which in ways:
        if not bool(which.any()):
            continue
        tally.add(head.layer, which)
        if found is not None:
            tally.measure(head, which, found)


def _left_out(layer: Layer, head: HeadSets) -> LeftOut:
    """Losing each token of the head alone, at the steps at which one side lacks it and the other does not."""
    geometry, kv_head = layer.geometry, head.kv_head
    group = slice(kv_head * geometry.group, (kv_head + 1) * geometry.group)
    at = layer.query_steps >= head.evaluated_from
    steps = layer.query_steps[at]
    found = leave_one_out(
        layer.queries[group][:, at],
        layer.keys[kv_head : kv_head + 1],
        layer.values[kv_head : kv_head + 1],
        torch.minimum(head.a, head.b)[None],
        torch.maximum(head.a, head.b)[None],
        steps=steps,
        rows=torch.arange(layer.tokens),
        first_visible=geometry.first_visible(steps),
        scale=geometry.scale,
        softcap=geometry.softcap,
        sink_logits=None if geometry.sink_logits is None else geometry.sink_logits[group],
    )
    for sums in (found.squared_output, found.squared_error):
        if not bool(torch.isfinite(sums).all()):
            raise KvtoolError(
                "not-finite",
                f"attention of sequence {head.sequence}, layer {head.layer}, KV head {kv_head} is NaN or infinite",
                "kvtool inspect --verify says whether the trace is damaged",
            )
    return found


def _entries(run: Run | None, sequence: int, tally: _Tally, of: int, limit: int) -> list[dict[str, Any]]:
    """The dearest tokens; where nothing is known of damage, those that most heads lose."""
    tokens = tally.heads.nonzero()[:, 0].tolist()
    tokens.sort(key=lambda row: (-float(tally.damage[row]), -int(tally.heads[row]), row))
    return [_entry(run, sequence, tally, row, of) for row in tokens[: max(limit, 0)]]


def _entry(run: Run | None, sequence: int, tally: _Tally, row: int, of: int) -> dict[str, Any]:
    damaged, asked, worst = int(tally.damaged[row]), int(tally.asked[row]), float(tally.worst[row])
    layer, kv_head, q_head = tally.place[row].tolist()
    return {
        "sequence": sequence,
        "token": row,
        "position": None if run is None else int(run.positions[row]),
        "text": run.text(row) if run is not None and run.has_array("text") else None,
        "heads": int(tally.heads[row]),
        "of": of,
        "layers": sorted({of_layer for of_layer, which in tally.of_head if bool(which[row])}),
        "attention_mass": float(tally.mass[row]) / asked if asked else None,
        "damage": math.sqrt(float(tally.squared[row]) / damaged) if damaged else None,
        "worst": None if math.isnan(worst) else {"layer": layer, "kv_head": kv_head, "q_head": q_head, "damage": worst},
    }
