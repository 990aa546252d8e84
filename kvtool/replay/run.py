"""Replay: every unit of work (sequence, layer) with all its cells, then the means over them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from fractions import Fraction
from pathlib import Path
from statistics import fmean
from typing import Any

from kvtool.errors import KvtoolError
from kvtool.manifest import digest, environment, versions
from kvtool.metrics import built_in_metrics
from kvtool.replay.notes import sentences
from kvtool.replay.parts import Part, Partials, Store
from kvtool.replay.plan import Plan, make_plan
from kvtool.replay.serving import donor_of, missing_for
from kvtool.replay.unit import METRICS, run_unit
from kvtool.result import Result, concatenate, table_of
from kvtool.trace import Sequence, Trace, open_trace
from kvtool.words import spans

Progress = Callable[[int, int, str], None]


def replay(
    trace: str | Path | Trace,
    policies: Many[str] = ("all",),
    *,
    ratios: Many[str | float | Fraction] = (),
    budgets: Many[int] = (),
    evict_at: int | None = None,
    sinks: int = 4,
    window: int = 32,
    layers: Iterable[int] | None = None,
    sequences: Iterable[int] | None = None,
    evaluate: str = "live",
    precision: str = "float32",
    device: str = "auto",
    output: str | Path | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Result:
    """Replay policies on a trace and measure what eviction does to attention's output.

    Prints nothing. The controls `full` and `random` always run. With `output`, finished units are
    kept there and a stopped run resumes; the folder is complete once it holds manifest.json.

    Args:
        policies: `name:key=value,…`, `file.py:Class:…`, or `all`.
        ratios: shares evicted; strings stay exact decimals. Or `budgets`, tokens kept per KV head.
        evict_at: step of the event; None is the end of each prompt.
        sinks, window: protected first and newest tokens, the same for every policy.
        layers, sequences: ids to replay; None is all.

    Raises:
        KvtoolError: bad input of any kind, before anything is written.
    """
    if device not in ("auto", "cpu"):
        raise KvtoolError("usage", f"--device {device} is not available in this version", "known: auto, cpu")
    plan = make_plan(
        policies,
        ratios=ratios,
        budgets=budgets,
        evict_at=evict_at,
        sinks=sinks,
        window=window,
        evaluate=evaluate,
        precision=precision,
    )
    store = Store(Path(output), force) if output is not None else None
    opened = trace if isinstance(trace, Trace) else open_trace(trace)
    work = _work(opened, plan, layers, sequences)
    plan, warnings = _servable(plan, work, optional="all" in policies)
    if store is None:
        return _gather(opened, plan, work, _run(opened, plan, work, None, progress), warnings)
    store.open()
    try:
        result = _gather(opened, plan, work, _run(opened, plan, work, store, progress), warnings)
        result.save(store.output)
    except BaseException:
        store.close(finished=False)
        raise
    store.close(finished=True)
    return result


def _run(
    trace: Trace, plan: Plan, work: list[tuple[Sequence, int, int]], store: Store | None, progress: Progress | None
) -> list[tuple[int, Part]]:
    """(sequence index, part) of every unit, taken from the store where it was finished before."""
    common = {"trace": trace.digest, "plan": plan.describe(), "metrics": METRICS, **versions("torch")}
    parts = []
    for done, (sequence, layer_id, step) in enumerate(work):
        if progress is not None:
            progress(done, len(work), f"sequence {sequence.index} layer {layer_id}")
        name, key = f"{sequence.index:04d}-{layer_id:03d}", digest({**common, "unit": [sequence.index, layer_id]})
        part = store.load(name, key) if store else None
        if part is None:
            part = run_unit(sequence, layer_id, plan, step)
            if store:
                store.save(name, key, part)
        parts.append((sequence.index, part))
    return parts


def _work(
    trace: Trace, plan: Plan, layers: Iterable[int] | None, sequences: Iterable[int] | None
) -> list[tuple[Sequence, int, int]]:
    """(sequence, layer id, event step) of every unit, checked against the trace."""
    chosen_layers = _pick(layers, trace.layer_ids, "layer")
    chosen = _pick(sequences, [s.index for s in trace.sequences], "sequence")
    work = []
    for sequence in trace.sequences:
        if sequence.index not in chosen:
            continue
        try:
            (step,) = plan.schedule.events(sequence.prompt_length, sequence.length)
        except KvtoolError as error:
            raise KvtoolError(error.code, f"sequence {sequence.index}: {error.message}", error.hint) from None
        for layer_id in sequence.layer_ids:
            if layer_id not in chosen_layers:
                continue
            if not bool((sequence.layer(layer_id).query_steps >= step).any()):
                raise KvtoolError(
                    "no-queries",
                    f"sequence {sequence.index}, layer {layer_id}: no query at or after the event at step {step}",
                    "choose an earlier --evict-at, or capture with --max-new-tokens or --eval-tokens",
                )
            work.append((sequence, layer_id, step))
    if not work:
        raise KvtoolError("usage", "no captured layer is left to replay")
    return work


def _pick(wanted: Iterable[int] | None, known: list[int], noun: str) -> list[int]:
    if wanted is None:
        return known
    chosen = list(wanted)
    unknown = [i for i in chosen if i not in known]
    if unknown or not chosen:
        raise KvtoolError(
            "usage",
            f"the trace has no {noun} {', '.join(map(str, unknown)) or 'named'}",
            f"it has {', '.join(map(str, known))}",
        )
    return chosen


def _servable(plan: Plan, work: list[tuple[Sequence, int, int]], optional: bool) -> tuple[Plan, list[str]]:
    """The plan without built-in policies that the trace cannot serve, where they came with `all` or as controls.

    Raises:
        KvtoolError: `trace-lacks` for a policy that was asked for by name.
    """
    kept, warnings = [], []
    for label, policy in plan.policies:
        reasons = (missing_for(policy, donor_of(s, layer_id), step) for s, layer_id, step in work)
        reason = next((r for r in reasons if r), None)
        if reason is None:
            kept.append((label, policy))
        elif optional:
            warnings.append(f"{label} is left out: {reason}")
        else:
            raise KvtoolError("trace-lacks", f"{label} cannot be replayed: {reason}", "kvtool inspect lists what can")
    return plan.only(kept), warnings


def _gather(
    trace: Trace, plan: Plan, work: list[tuple[Sequence, int, int]], parts: list[tuple[int, Part]], warnings: list[str]
) -> Result:
    """The whole result from all parts."""
    evicting = sum(not policy.keeps_all for _, policy in plan.policies)
    warnings = warnings + sentences([note for _, part in parts for note in part.notes], evicting, len(work))
    tables = {
        name: concatenate(
            [table_of(name, p.tables[name]) if isinstance(p.tables[name], list) else p.tables[name] for _, p in parts]
        )
        for name in ("layers", "rows", "ages", "evict_steps")
    }
    tables["cells"] = table_of("cells", _cells(plan, parts))
    layer_ids = sorted({layer_id for _, layer_id, _ in work})
    indices = sorted({s.index for s, _, _ in work})
    manifest = {
        "trace": {"path": str(trace.path), "digest": trace.digest},
        "model": trace.manifest["model"].get("name", "unnamed model"),
        "capture": trace.manifest.get("capture"),
        "sequences": {
            "count": len(indices),
            "indices": indices,
            "prompt_lengths": [s.prompt_length for s in trace.sequences if s.index in indices],
            "lengths": [s.length for s in trace.sequences if s.index in indices],
        },
        "layers": {"ids": layer_ids, "text": spans(layer_ids)},
        "replay": plan.describe(),
        "metrics": METRICS,
        "device": "cpu",
        "kernels": "reference (torch)",
        "environment": environment("pyarrow", "zarr"),
    }
    return Result(manifest, tables, warnings)


def _cells(plan: Plan, parts: list[tuple[int, Part]]) -> list[dict[str, Any]]:
    """One entry per cell and sequence, and one with `sequence` null: the mean over sequences."""
    entries = []
    for index, cell in enumerate(plan.cells):
        key = {**cell.key(plan), "event": None}
        per_sequence: list[dict[str, Any]] = []
        for sequence in dict.fromkeys(number for number, _ in parts):
            mine = [part for number, part in parts if number == sequence]
            partials: Partials = [part.partials[index] for part in mine]
            values: dict[str, Any] = {}
            for name, metric in built_in_metrics().items():
                values.update(metric.combine([partial[name] for partial in partials]))
            counted = [partial["counts"] for partial in partials]
            values["achieved"] = fmean(float(c["achieved"]) for c in counted)
            values["candidates"] = fmean(float(c["candidates"]) for c in counted)
            values["ties"] = sum(int(c["ties"]) for c in counted)
            per_sequence.append({"sequence": sequence, **key, "oracle": cell.policy.oracle, **values})
        mean = dict(per_sequence[0], sequence=None)
        for column in mean:
            if column in key or column in ("sequence", "oracle"):
                continue
            known = [entry[column] for entry in per_sequence if entry[column] is not None]
            mean[column] = fmean(known) if known else None
        entries += [*per_sequence, mean]
    return entries
