"""Work: which layers of which sequences are replayed, and which policies the trace can serve there."""

from __future__ import annotations

from collections.abc import Iterable

from kvtool.errors import KvtoolError
from kvtool.replay.decide import donor_of
from kvtool.replay.plan import Plan
from kvtool.replay.serving import missing_for
from kvtool.schedule import Schedule
from kvtool.trace import Sequence, Trace
from kvtool.words import parse_ids


def work_of(
    trace: Trace, plan: Plan, layers: Iterable[int] | None, sequences: Iterable[int] | None
) -> list[tuple[Sequence, int, int]]:
    """(sequence, layer id, first evaluated step) of every unit, checked against the trace."""
    chosen_layers = _pick(layers, trace.layer_ids, "layer")
    chosen = _pick(sequences, [s.index for s in trace.sequences], "sequence")
    work = []
    for sequence in trace.sequences:
        if sequence.index not in chosen:
            continue
        try:
            starts = [evaluated_from(schedule, sequence) for schedule in plan.schedules]
        except KvtoolError as error:
            raise KvtoolError(error.code, f"sequence {sequence.index}: {error.message}", error.hint) from None
        for layer_id in sequence.layer_ids:
            if layer_id not in chosen_layers:
                continue
            last = max(starts)  # of the schedule that starts last
            if not bool((sequence.layer(layer_id).query_steps >= last).any()):
                raise KvtoolError(
                    "no-queries",
                    f"sequence {sequence.index}, layer {layer_id}: no query at or after the event at step {last}",
                    "choose an earlier --evict-at, or capture with --max-new-tokens or --eval-tokens",
                )
            work.append((sequence, layer_id, min(starts)))
    if not work:
        raise KvtoolError("usage", "no captured layer is left to replay")
    return work


def evaluated_from(schedule: Schedule, sequence: Sequence) -> int:
    """Where the evaluation of a cell starts: at the schedule's first event on any layer of the sequence, whatever
    else the run compares; at the end of the prompt where no event ever runs.

    Raises:
        KvtoolError: code `no-queries`.
    """
    schedule.check(sequence.prompt_length, sequence.length)
    geometries = {layer_id: sequence.parsed[layer_id][0] for layer_id in sequence.layer_ids}
    caches = [g if g.kv_source is None else geometries[g.kv_source] for g in geometries.values()]
    # Layers that see the same rows have the same first event: one of each kind is asked.
    kinds = {(geometry.kind, geometry.window): geometry for geometry in caches}
    found = [schedule.first_event(g, sequence.prompt_length, sequence.length) for g in kinds.values()]
    known = [step for step in found if step is not None]
    if not known and sequence.prompt_length >= sequence.length:
        raise KvtoolError(
            "no-queries",
            f"no event ever runs, and there is no query after the prompt of {sequence.prompt_length} tokens",
            "capture with --max-new-tokens or --eval-tokens, or start inside the prompt with --from 0",
        )
    return min(known, default=sequence.prompt_length)


def _pick(wanted: Iterable[int] | None, known: list[int], noun: str) -> list[int]:
    if wanted is None:
        return known
    chosen = parse_ids(wanted, f"{noun}s") if isinstance(wanted, str) else list(wanted)
    assert chosen is not None
    unknown = [i for i in chosen if i not in known]
    if unknown or not chosen:
        raise KvtoolError(
            "usage",
            f"the trace has no {noun} {', '.join(map(str, unknown)) or 'named'}",
            f"it has {', '.join(map(str, known))}",
        )
    return chosen


def unequal_starts(plan: Plan, work: list[tuple[Sequence, int, int]]) -> list[str]:
    """A warning where schedules are measured on different steps of a sequence."""
    for sequence in {sequence.index: sequence for sequence, _, _ in work}.values():
        starts = {str(schedule): evaluated_from(schedule, sequence) for schedule in plan.schedules}
        if len(set(starts.values())) > 1:
            said = ", ".join(f"{word} from step {step}" for word, step in starts.items())
            return [
                f"schedules are measured from their own first event on (sequence {sequence.index}: {said}), so their "
                "numbers speak of different steps"
            ]
    return []


def servable(plan: Plan, work: list[tuple[Sequence, int, int]], optional: bool) -> tuple[Plan, list[str]]:
    """The plan without built-in policies that the trace cannot serve, where they came with `all` or as controls.

    Raises:
        KvtoolError: `trace-lacks` for a policy that was asked for by name.
    """
    kept, warnings = [], []
    # Each reads small arrays. Later events need more of the past: the last possible one is asked too.
    donors = [(donor_of(s, s.layer(layer_id)), step) for s, layer_id, step in work]
    if plan.repeats:
        donors += [(donor, int(donor.query_steps[-1])) for donor, _ in donors]
    for label, policy in plan.policies:
        calibration = plan.calibrations.get(policy.calibration_trace or "")
        reasons = (missing_for(policy, donor, step, calibration) for donor, step in donors)
        reason = next((r for r in reasons if r), None)
        if reason is None:
            kept.append((label, policy))
        elif optional:
            warnings.append(f"{label} is left out: {reason}")
        else:
            raise KvtoolError("trace-lacks", f"{label} cannot be replayed: {reason}", "kvtool inspect lists what can")
    return plan.only(kept), warnings
