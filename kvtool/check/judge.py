"""Judge: one number, one layer's decisions or one job against what the baseline says of it. Nothing is read or run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kvtool.check.cuts import rounding_parts
from kvtool.check.digits import Number, stored
from kvtool.check.undefined import counted_column
from kvtool.compare.ties import coarser_of

Outcome = Literal["same", "within", "better", "worse", "moved", "tie", "missing", "new", "failed"]
Kind = Literal["identical", "numerics", "behaviour", "unknown"]
Direction = Literal["lower", "higher", "none"]

# From what must be looked at first to what need not be looked at.
ORDER: tuple[Outcome, ...] = ("failed", "missing", "moved", "worse", "new", "better", "tie", "within", "same")
FAILING: tuple[Outcome, ...] = ("failed", "missing", "moved", "worse")
KINDS: tuple[Kind, ...] = ("behaviour", "unknown", "numerics", "identical")


@dataclass(frozen=True)
class Tolerance:
    """A new number passes where |new - old| <= absolute + relative * |old|."""

    relative: float = 1e-6
    absolute: float = 1e-12

    def allows(self, old: float, new: float) -> bool:
        return abs(new - old) <= self.absolute + self.relative * abs(old)


@dataclass(frozen=True)
class Value:
    """One metric of one cell.

    Attributes:
        old, new: what the baseline says and what was found; None is undefined, or not there at all.
        tolerance: that the two were held against.
        gone: it is no longer there at all.
        changed: what the metric was in the baseline and what it is now, in words, where that makes it another number.
    """

    metric: str
    outcome: Outcome
    old: Number
    new: Number
    direction: Direction
    tolerance: Tolerance
    gone: bool = False
    changed: tuple[str, str] | None = None


@dataclass(frozen=True)
class LayerMove:
    """What became of one layer of one cell.

    Attributes:
        outcome: of its decisions.
        kind: `behaviour` where decisions moved beyond ties, `numerics` where ties fell otherwise or only its error
            moved, `identical`, or `unknown` where one side says nothing of the layer.
        kv_heads: whose decisions moved.
        kept: per KV head of these, rows that were never evicted: before and now.
        error: of the layer, before and now.
    """

    layer: int
    outcome: Outcome
    kind: Kind
    kv_heads: tuple[int, ...] = ()
    kept: tuple[tuple[int, int], ...] = ()
    error: tuple[Number, Number] = (None, None)


@dataclass(frozen=True)
class Row:
    """One cell in one sequence: every metric, every layer whose decisions were compared; `gone` where nothing makes
    the cell any more."""

    name: str
    values: tuple[Value, ...]
    layers: tuple[LayerMove, ...]
    gone: bool = False

    def outcomes(self) -> set[Outcome]:
        return {value.outcome for value in self.values} | {layer.outcome for layer in self.layers}

    @property
    def outcome(self) -> Outcome:
        """The one that must be looked at first."""
        found = self.outcomes()
        return next((outcome for outcome in ORDER if outcome in found), "same")

    @property
    def kind(self) -> Kind:
        """`behaviour` where decisions moved beyond ties, `numerics` where only numbers (or ties) did, `unknown` where
        numbers moved and no decisions were compared, or one side has nothing to compare with."""
        kinds = {layer.kind for layer in self.layers}
        outcomes = {value.outcome for value in self.values} - {"same"}
        if outcomes:
            one_sided = outcomes <= {"missing", "new"}
            kinds.add("unknown" if one_sided or not self.layers else "numerics")
        return next((kind for kind in KINDS if kind in kinds), "identical")

    def fails(self, strict: bool = False) -> bool:
        """Whether a part of it is no pass; with `strict` one that the baseline lacks is none either."""
        return bool(self.outcomes() & {*FAILING, *(("new",) if strict else ())})


def judge_value(old: Number, new: Number, tolerance: Tolerance, direction: Direction) -> Outcome:
    """What became of a number. A number that is undefined now is `missing`, one that was undefined is `new`."""
    if old is None or new is None:
        return "same" if old is new else "missing" if new is None else "new"
    if stored(new) == old:
        return "same"
    if tolerance.allows(old, new):
        return "within"
    if direction == "none":
        return "moved"
    return "better" if (new < old) == (direction == "lower") else "worse"


def judge_layer(
    layer: int, old: Mapping[str, Any] | None, new: Mapping[str, Any] | None, coarser: str | None = None
) -> LayerMove:
    """What became of the decisions of one layer.

    A head whose evict steps differ is a tie where kvtool.compare.ties says so of both sides. A head of which one side
    keeps no cuts had no near ties, or exact ones only, which the newer token wins on every machine: it is compared
    exactly.

    Args:
        coarser: `a` for old or `b` for new, where that side alone was computed in float32.
    """
    if old is None or new is None:
        return LayerMove(layer, "new" if old is None else "missing", "unknown")
    error = (old["error"], new["error"])
    if old["digest"] == new["digest"]:
        silent = judge_value(*error, Tolerance(0, 0), "none") == "same"
        return LayerMove(layer, "same", "identical" if silent else "numerics", error=error)
    heads = range(len(new["heads"]))
    if len(old["heads"]) != len(heads):
        return LayerMove(layer, "moved", "behaviour", tuple(heads), error=error)
    # Where the layer's digest alone differs, a head's short one met its like.
    moved = [head for head in heads if old["heads"][head] != new["heads"][head]] or list(heads)
    before, now = old.get("cuts", {}), new.get("cuts", {})
    tie = all(rounding_parts(before.get(str(head)), now.get(str(head)), coarser) for head in moved)
    kept = tuple((old["kept"][head], new["kept"][head]) for head in moved)
    return LayerMove(
        layer, "tie" if tie else "moved", "numerics" if tie else "behaviour", tuple(moved), kept, error=error
    )


def changed_number(metric: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[str, str] | None:
    """What the column `metric` was in one entry of a baseline and is in another, in words, where it is not one and
    the same number: another version of its metric, or other parameters. A count of undefined values goes with what it
    counts."""
    names = (metric, counted_column(metric))
    then, now = (next((v[n] for n in names if n in v), None) for v in (old.get("metrics", {}), new.get("metrics", {})))
    if then != now:
        return f"version {then}", f"version {now}"
    before, after = (_asked(names, job.get("asked", {})) for job in (old, new))
    if before == after:
        return None
    whole = before["label"] == after["label"]  # the defaults moved
    said = [f"{one['label']} {one['parameters']}" if whole else str(one["label"]) for one in (before, after)]
    return said[0], said[1]


def _asked(names: tuple[str | None, ...], asked: Mapping[str, Any]) -> Mapping[str, Any]:
    """How the metric was asked for that has one of these columns."""
    for one in asked.values():
        if any(name in one["columns"] for name in names):
            return {"label": one["label"], "parameters": one["parameters"]}
    return {"label": "nothing by name", "parameters": {}}


def judge_job(
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    tolerance_of: Callable[[str], Tolerance],
    direction_of: Callable[[str], Direction],
) -> list[Row]:
    """Every cell of a job, sorted by name.

    Args:
        old, new: entries of a baseline (kvtool.check.baseline), `old` empty for a job that it lacks.
    """
    precision = (job.get("settings", {}).get("precision") for job in (old, new))
    coarser = coarser_of(*precision)
    by_cell: dict[str, dict[int, tuple[Any, Any]]] = {}
    decisions_then, decisions_now = old.get("decisions", {}), new["decisions"]
    for key in sorted({*decisions_then, *decisions_now}):
        cell, _, layer = key.rpartition(" layer ")
        by_cell.setdefault(cell, {})[int(layer)] = (decisions_then.get(key), decisions_now.get(key))
    cells_then, cells_now = old.get("cells", {}), new["cells"]
    rows = []
    for name in sorted({*cells_then, *cells_now, *by_cell}):
        then, now = cells_then.get(name, {}), cells_now.get(name, {})
        values = []
        for metric in sorted({*then, *now}):
            tolerance, direction = tolerance_of(metric), direction_of(metric)
            (was, before), (there, after) = _said(then, metric), _said(now, metric)
            changed = changed_number(metric, old, new) if was and there else None
            outcome: Outcome
            if not (was and there):
                outcome = "new" if there else "missing"
            elif changed is not None:  # the same word for another number
                outcome = "moved"
            else:
                outcome = judge_value(before, after, tolerance, direction)
            values.append(Value(metric, outcome, before, after, direction, tolerance, not there, changed))
        layers = [judge_layer(layer, *pair, coarser) for layer, pair in sorted(by_cell.get(name, {}).items())]
        gone = name not in cells_now and not any(move.outcome != "missing" for move in layers)
        rows.append(Row(name, tuple(values), tuple(layers), gone))
    return rows


def _said(row: Mapping[str, Number], metric: str) -> tuple[bool, Number]:
    """Whether a cell has a number, and which. A count of undefined values that is not written is 0."""
    if metric in row:
        return True, row[metric]
    return (True, 0) if counted_column(metric) in row else (False, None)
