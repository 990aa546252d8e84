"""Coverage: what the gradients of a trace can say of one event, and what is missing from it."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import torch

from kvtool.replay.plan import Plan
from kvtool.trace import Sequence, Trace
from kvtool.words import spans

HOW = "capture with --gradients 4"


@dataclass(frozen=True)
class Coverage:
    """What `predicted_kl` of one sequence speaks of.

    Attributes:
        missing: why there is none, or None.
        partial: what it leaves out, or None where it speaks of the whole.
        block: evaluated steps in a block of gradients; None where there are none.
        cut: there are several blocks, so that later targets are missing from the gradients.
    """

    missing: str | None = None
    partial: str | None = None
    block: int | None = None
    cut: bool = False

    @property
    def label(self) -> str | None:
        """What stands in the column `predicted_kl_partial`."""
        return self.missing or self.partial


def coverage(trace: Trace, sequence: Sequence, plan: Plan, layer_ids: list[int], step: int) -> Coverage:
    """Hold the gradients of `sequence` against an event at `step` replayed on `layer_ids`."""
    if plan.evaluate != "live":
        return Coverage("gradients speak of the live set, what the model would see; use --evaluate live")
    drawn = [layer_id for layer_id in layer_ids if sequence.has_array("output_gradients", layer_id)]
    gradients = sequence.gradients
    if gradients is None or not drawn:
        return Coverage(f"the trace has no gradients; {HOW}")
    past_targets = gradients.targets[1]
    layers = [sequence.layer(layer_id) for layer_id in drawn]
    known = next(layer.gradient_steps for layer in layers if layer.gradient_steps is not None)  # all have the same
    first, evaluated = int(known[0]), known[known >= step]
    # By layer the evaluated steps that also have a query: where there is none, nothing is computed.
    usable = [evaluated[torch.isin(evaluated, layer.query_steps)] for layer in layers]
    if past_targets <= step:
        earlier = f"what was drawn starts at step {first}, see --evict-at"
        return Coverage(f"nothing was drawn at or after the event at step {step}; {earlier}")
    starts = [int(steps[0]) for steps in usable if len(steps)]
    if not starts:
        return Coverage(f"no step at or after the event at step {step} has both a gradient and a query")
    if past_targets <= min(starts):
        without = f"the first step with both a gradient and a query, after the event at step {step}"
        return Coverage(f"nothing was drawn at or after step {min(starts)}, {without}")
    said = []
    if first > step:
        said.append(f"gradients start at step {first}, after the event at step {step}")
    if (left_out := _layers_left_out(trace, drawn)) is not None:
        said.append(left_out)
    unasked = len(evaluated) - min(len(steps) for steps in usable)
    if unasked:
        said.append(f"{unasked} steps have a gradient but no query")
    # Blocks start at the first step with a gradient: what is cut is a later target in another block.
    cut = (max(step, first) - first) // gradients.block != (past_targets - 1 - first) // gradients.block
    if cut:
        said.append(f"gradients in blocks of {gradients.block} steps leave out later targets")
    return Coverage(None, "; ".join(said) or None, gradients.block, cut)


def _layers_left_out(trace: Trace, drawn: list[int]) -> str | None:
    """Sums run over layers before they are squared, so a subset of the model's is a different number."""
    count = trace.manifest["model"].get("layers")
    captured = (trace.manifest.get("capture") or {}).get("layers")
    if (captured == "all" and drawn == trace.layer_ids) or len(drawn) == count:
        return None
    return f"layers {spans(drawn)} of {count}" if count else f"layers {spans(drawn)} of an unknown number"


@dataclass(frozen=True, eq=False)
class Coverages:
    """What the gradients of a run's sequences can say, from any step on.

    Attributes:
        layers: sequence index -> the layers that are replayed.
        starts: sequence index -> the first evaluated step of any cell.
    """

    trace: Trace
    plan: Plan
    sequences: dict[int, Sequence]
    layers: dict[int, list[int]]
    starts: dict[int, int]
    known: dict[tuple[int, int], Coverage] = field(default_factory=dict)

    @classmethod
    def of(cls, trace: Trace, plan: Plan, work: Many[tuple[Sequence, int, int]]) -> Coverages:
        """Of the sequences in `work`: (sequence, layer id, first evaluated step)."""
        found = cls(trace, plan, {}, {}, {})
        for sequence, layer, step in work:
            found.sequences[sequence.index] = sequence
            found.layers.setdefault(sequence.index, []).append(layer)
            found.starts[sequence.index] = step
        return found

    def first(self) -> dict[int, Coverage]:
        """Sequence index -> of the whole run."""
        return {index: self.since(index, step) for index, step in self.starts.items()}

    def since(self, index: int, step: int) -> Coverage:
        """Of sequence `index`, for an evaluation that starts at `step`."""
        if (index, step) not in self.known:
            found = coverage(self.trace, self.sequences[index], self.plan, self.layers[index], step)
            self.known[index, step] = found
        return self.known[index, step]


def over_sequences(found: Mapping[int, Coverage]) -> Coverage:
    """What a mean over sequences speaks of.

    Gradients cut into blocks of different sizes give numbers that are not compared, hence no mean.
    """
    labels = {index: one.label for index, one in found.items()}
    kinds = {one.block if one.cut else None for one in found.values() if one.missing is None}
    sizes = {one.block for one in found.values() if one.missing is None}
    if len(kinds) > 1:
        return Coverage("sequences whose gradients were cut into different blocks have no common mean")
    label = next(iter(labels.values()))
    if len(set(labels.values())) > 1:
        label = "; ".join(f"sequence {index}: {text}" for index, text in labels.items() if text is not None)
    block = sizes.pop() if len(sizes) == 1 else None
    if not any(one.missing is None for one in found.values()):
        return Coverage(missing=label)
    return Coverage(None, label, block, None not in kinds)
