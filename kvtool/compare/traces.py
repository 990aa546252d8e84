"""Traces: whether two captures of the same tokens hold the same run, and where they part first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from kvtool.compare.trace_rows import ARRAYS, Parted, Place, compare_array, compared, deviations, number, rows_of
from kvtool.compare.trace_settings import geometry_differences, refuse_other_shapes, settings
from kvtool.compare.traces_diff import Entry, TracesDiff
from kvtool.errors import KvtoolError
from kvtool.trace import Sequence, Trace
from kvtool.trace.gradients import gradient_attributes
from kvtool.trace.layout import dtype_name
from kvtool.trace.recompute import dtypes, error_bound

Progress = Callable[[int, int, str], None]


def diff_traces(a: Trace, b: Trace, progress: Progress | None = None, *, relative: float | None = None) -> TracesDiff:
    """Compare two traces of the same tokens; holds one head of one array of each at a time.

    A row of keys, values, queries or output deviates by |x_a - x_b| over its own norm, or over the root mean square of
    its head's norms where that is more. It parts beyond `layer_bound` of the wider dtype of the two traces.
    Sequences are paired by their number; behind a token that differs nothing is compared.

    Args:
        progress: called with (layers done, layers in all, what).
        relative: the bound of every row instead.

    Raises:
        KvtoolError: code `shape` for other token counts or head geometry, `usage` where no layer is in both.
    """
    bound = max(error_bound(*dtypes(trace)) for trace in (a, b))
    found = TracesDiff(
        a=_side(a),
        b=_side(b),
        identical=a.digest == b.digest,
        bound=bound if relative is None else relative,
        fixed=relative is not None,
    )
    if found.identical:
        return found
    others = {sequence.index: sequence for sequence in b.sequences}
    pairs = [(sequence, others[sequence.index]) for sequence in a.sequences if sequence.index in others]
    for pair in pairs:
        refuse_other_shapes(*pair)
    if not any(set(one.layer_ids) & set(two.layer_ids) for one, two in pairs):
        raise KvtoolError("usage", f"no layer of {a.path} is in {b.path}", "kvtool inspect lists the layers of both")
    found.settings.extend(settings(a, b))
    _sequence_holes(found, a, b)
    total, done = sum(len(set(one.layer_ids) & set(two.layer_ids)) for one, two in pairs), 0
    first: Entry | None = None
    for one, two in pairs:
        before = _tokens(found, one, two)
        found.settings.extend(_gradients(one, two))
        for layer in sorted(set(one.layer_ids) & set(two.layer_ids)):
            if progress is not None:
                progress(done, total, f"sequence {one.index} layer {layer}")
            place = _layer(found, one, two, layer, before)
            first = first or place
            done += 1
    _projections(found, pairs[0][0], pairs[0][1])
    return replace(found, first=first)


def _side(trace: Trace) -> Entry:
    return {
        "path": trace.shown,
        "digest": trace.digest,
        "model": (trace.manifest.get("model") or {}).get("name"),
        "run_dtype": dtypes(trace)[0],
        "stored_dtype": dtype_name(trace.stored_dtype),
    }


def _hole(sequence: int, layer: int | None = None, array: str | None = None, rows: int | None = None) -> Entry:
    return {"sequence": sequence, "layer": layer, "array": array, "rows": rows}


def _sequence_holes(found: TracesDiff, a: Trace, b: Trace) -> None:
    """Sequences and layers that one of them lacks."""
    for holes, mine, other in ((found.only_a, a, b), (found.only_b, b, a)):
        there = {sequence.index: sequence.layer_ids for sequence in other.sequences}
        for sequence in mine.sequences:
            if sequence.index not in there:
                holes.append(_hole(sequence.index))
                continue
            gone = [layer for layer in sequence.layer_ids if layer not in there[sequence.index]]
            holes.extend(_hole(sequence.index, layer) for layer in gone)


def _tokens(found: TracesDiff, a: Sequence, b: Sequence) -> int:
    """Note the first token and position that differ, and the prompt's length; returns the rows that may agree."""
    before = a.length
    for what, mine, other in (("token", a.tokens, b.tokens), ("position", a.positions, b.positions)):
        unequal = (mine != other).nonzero()[:, 0]
        if not unequal.numel():
            continue
        row = int(unequal[0])
        before = min(before, row)
        texts = [side.text(row) if side.has_array("text") else None for side in (a, b)]
        found.tokens.append(
            {
                "sequence": a.index,
                "what": what,
                "row": row,
                "differing": unequal.numel(),
                "a": int(mine[row]),
                "b": int(other[row]),
                "text_a": texts[0],
                "text_b": texts[1],
            }
        )
    if a.prompt_length != b.prompt_length:
        sides: Entry = {"a": a.prompt_length, "b": b.prompt_length}
        found.tokens.append({"sequence": a.index, "what": "prompt_length", "row": None, "differing": None, **sides})
    return before


def _gradients(a: Sequence, b: Sequence) -> list[Entry]:
    """How gradients were drawn, where the two say it differently; their values are never compared."""
    sides = [None if s.gradients is None else gradient_attributes(s.gradients) for s in (a, b)]
    if sides[0] == sides[1]:
        return []
    return [{"name": f"sequences[{a.index}].gradients", "a": sides[0], "b": sides[1]}]


def _layer(found: TracesDiff, a: Sequence, b: Sequence, layer: int, before: int) -> Entry | None:
    """Everything of one layer; the first row beyond the bound."""
    bound = found.bound_of_layer(layer)
    found.geometry.extend(geometry_differences(a, b, layer, found.bound))
    _array_holes(found, a, b, layer)
    first: Place | None = None
    for name, rows, at_a, at_b in compared(a, b, layer, before):
        parted = compare_array(a, b, layer, name, rows, at_a, at_b, bound)
        found.layers.append(_line(a, layer, name, parted, bound))
        if parted.first is not None and (first is None or parted.first.order < first.order):
            first = parted.first
    return None if first is None else {**first.entry(a, layer), "bound": bound}


def _line(sequence: Sequence, layer: int, name: str, parted: Parted, bound: float) -> Entry:
    top = parted.largest
    return {
        "sequence": sequence.index,
        "layer": layer,
        "array": name,
        "largest": None if top is None else number(top.deviation),
        "bound": bound,
        "at": None if top is None else {"token": top.row, **top.heads},
        "rows": parted.rows,
        "heads": parted.heads,
        "tokens_off": len(parted.rows_off),
        "first_token_off": parted.rows_off[0] if parted.rows_off else None,
        "heads_off": parted.heads_off,
        "unequal": parted.unequal,
    }


def _array_holes(found: TracesDiff, a: Sequence, b: Sequence, layer: int) -> None:
    """Arrays and query steps that one of them lacks."""
    for holes, mine, other in ((found.only_a, a, b), (found.only_b, b, a)):
        for name in (*ARRAYS, "output_projection"):
            if not mine.has_array(name, layer):
                continue
            if not other.has_array(name, layer):
                holes.append(_hole(mine.index, layer, name))
            elif name in ("queries", "output_sample"):
                steps = [rows_of(side, name, layer) for side in (mine, other)]
                gone = int((~torch.isin(steps[0], steps[1])).sum())
                holes.extend([_hole(mine.index, layer, name, gone)] if gone else [])


def _projections(found: TracesDiff, a: Sequence, b: Sequence) -> None:
    """The output projections, weights of the model: the bound of one attention, whatever the layer."""
    for layer in sorted(set(a.layer_ids) & set(b.layer_ids)):
        if not (a.has_array("output_projection", layer) and b.has_array("output_projection", layer)):
            continue
        if a.shape("output_projection", layer) != b.shape("output_projection", layer):
            raise KvtoolError("shape", f"the output projections of layer {layer} have different shapes")
        heads = zip(*(side.array("output_projection", layer) for side in (a, b)), strict=True)
        each = [float(deviations(x, y).max()) for x, y in heads]
        off = [head for head, value in enumerate(each) if value > found.bound]
        largest = max(range(len(each)), key=each.__getitem__)
        found.projections.append(
            {
                "layer": layer,
                "largest": number(each[largest]),
                "bound": found.bound,
                "q_head": largest,
                "heads": len(each),
                "heads_off": len(off),
            }
        )
