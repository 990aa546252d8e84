"""Serving: which policies and metrics a trace has the data for, and what is missing for the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvtool.layer import Layer
from kvtool.metrics import PredictedKL, columns
from kvtool.policies import BUILT_IN, Policy, policy_from_text
from kvtool.replay.calibration import Calibration
from kvtool.replay.decide import donor_of
from kvtool.rotation import Rotation
from kvtool.view import gradients_missing


@dataclass(frozen=True)
class Serving:
    """Whether a trace can serve one policy or metric.

    Attributes:
        kind: `policy` or `metric`.
        reason: what is missing, None where `ok`.
    """

    name: str
    kind: str
    ok: bool
    reason: str | None


def missing_for(policy: Policy, donor: Layer, step: int, calibration: Calibration | None = None) -> str | None:
    """What `policy` needs at an event before `step` and the layer does not hold, or None.

    Args:
        donor: the layer whose keys, values and queries are scored: the layer itself, or the one whose
            cache it reads.
        calibration: the trace of other texts that the policy reads, if it does.
    """
    if policy.skips(donor.geometry):
        return None
    steps, geometry = donor.query_steps, donor.geometry
    where, wanted = f"layer {geometry.layer}", policy.queries_back(step)
    held = int(((steps < step) & (steps >= step - wanted)).sum())
    if held < wanted:
        return f"{where} holds {held} of the {wanted} queries before the event (captured without --queries all)"
    if "rotation" in policy.needs and geometry.rotation is None:
        return f"{where} does not say how queries and keys were rotated"
    recorded = isinstance(geometry.rotation, Rotation) and not geometry.rotation.by_position
    if "future-rotation" in policy.needs and recorded:
        return f"{where} has a rotation that is known for its own rows only, not for future positions"
    if "output-projection" in policy.needs and not donor.has("output_projection"):
        return f"{where} has no output projection"
    if "prompt-gradients" in policy.needs and (lacking := gradients_missing(donor, step)) is not None:
        return lacking[0]
    if calibration is not None and (lacking_there := calibration.missing(donor)) is not None:
        return lacking_there
    if policy.oracle and not bool((steps >= step).any()):
        return f"{where} has no query after the event, and an oracle needs the future"
    return None


def serving(trace: Any) -> list[Serving]:
    """For every built-in policy and every metric column: can this trace serve it at the end of its prompts?"""
    found: list[Serving] = []
    layers = [(s, s.layer(layer_id)) for s in trace.sequences for layer_id in s.layer_ids]
    donors = [(s, donor_of(s, layer)) for s, layer in layers]
    for name in BUILT_IN:
        _, policy = policy_from_text(name, own=True)
        reasons = (missing_for(policy, donor, s.prompt_length) for s, donor in donors)
        reason = next((r for r in reasons if r), None)
        found.append(Serving(name, "policy", reason is None, reason))
    unasked = next(
        (
            f"sequence {s.index} has no query at or after its prompt's end"
            for s, layer in layers
            if not bool((layer.query_steps >= s.prompt_length).any())
        ),
        None,
    )
    projected = all(layer.has("output_projection") for _, layer in layers)
    unpredicted = next(
        (
            f"no gradients at or after the prompt's end in sequence {s.index}, layer {layer.geometry.layer} "
            "(captured without --gradients)"
            for s, layer in layers
            if layer.gradient_steps is None or not bool((layer.gradient_steps >= s.prompt_length).any())
        ),
        None,
    )
    for column in {column.name: column for column in columns()}.values():
        reason = unasked
        if reason is None and column.name in ("layer_error", "mean_layer_error") and not projected:
            reason = "no output projection in some layer"
        if reason is None and column.name.startswith(PredictedKL.name):
            reason = unpredicted
        found.append(Serving(column.name, "metric", reason is None, reason))
    return found


def first_replay(trace: Any) -> str:
    """A replay command that says something about this trace, to be typed as it stands.

    The default protection (4 sinks, 32 newest) decides everything on a short prompt, so it shrinks there.
    """
    shortest = min(sequence.prompt_length for sequence in trace.sequences)
    asked = all(
        bool((sequence.query_steps(layer_id) >= sequence.prompt_length).any())
        for sequence in trace.sequences
        for layer_id in sequence.layer_ids
    )
    if not asked or shortest < 4:
        return f"kvtool inspect {trace.shown}"
    small = f" --sinks 1 --window {max(1, shortest // 8)}" if shortest < 128 else ""
    return f"kvtool replay {trace.shown} -p all -r 0.5{small}"
