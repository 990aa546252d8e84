"""Gradients: how the model's own next-token log-probabilities depend on every attention output of the evaluated steps.

A zero is added to the output of each layer's attention function, and random cotangents at the logits of
every target step (see kvtool.capture.cotangents) are pulled back to the zeros: once a draw. Parameters and
the cache before a block are constant; keys and values that the block's own steps write are part of the graph.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvtool.capture.cotangents import Probe, cotangents
from kvtool.capture.generation import Feed
from kvtool.capture.gradient_plan import GradientPlan
from kvtool.capture.hook import AttentionCall, observed
from kvtool.capture.kept_outputs import KeptOutputs
from kvtool.errors import KvtoolError
from kvtool.layer import Geometry, Gradients

# How far one forward over a block may be from the run itself, whose forwards were of other lengths
# (relative L2 of attention's output): rounding of each dtype, grown through the layers.
_ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-2, torch.float16: 0.1, torch.bfloat16: 0.3}
_HELD_ROWS = 8


@dataclass(frozen=True, eq=False)
class Drawn:
    """Gradients of one sequence.

    Attributes:
        how: see kvtool.layer.Gradients.
        steps: [Tg] their rows, ascending.
        arrays: layer -> [S, H, Tg, Dv] in the run's dtype.
        uniforms: [S, steps] in [0, 1), the number that decided each draw at each target step.
    """

    how: Gradients
    steps: Tensor
    arrays: dict[int, Tensor]
    uniforms: Tensor


class _Zeros:
    """Observer that adds a zero with a gradient to every attention output of the given layers."""

    def __init__(self, layers: Mapping[int, Geometry]) -> None:
        self.added: dict[int, list[Tensor]] = {layer: [] for layer in layers}  # each [1, n, H, Dv]
        self.outputs: dict[int, list[Tensor]] = {layer: [] for layer in layers}  # each [n, H, Dv]

    def wants(self, layer: int) -> bool:
        return layer in self.added

    def shifted(self, layer: int, output: Tensor) -> Tensor:
        zero = torch.zeros_like(output, requires_grad=True)
        self.added[layer].append(zero)
        return output + zero

    def see(self, call: AttentionCall) -> None:
        self.outputs[call.layer].append(call.output.detach())


def draw_gradients(
    model: Any,
    feed: Feed,
    plan: GradientPlan,
    tokens: list[int],
    prompt_length: int,
    geometries: Mapping[int, Geometry],
    ran: Mapping[int, KeptOutputs],
    progress: Callable[[int], None] | None = None,
) -> Drawn:
    """Draw cotangents at the logits and pull them back to the attention outputs of the evaluated steps.

    Args:
        model: causal language model in evaluation mode, parameters without gradients.
        feed: its cache just before the first evaluated step; used up.
        tokens: the whole sequence's.
        geometries: the layers to differentiate by.
        ran: layer -> its outputs in the run itself, at `plan.differentiated` steps; every block is held against them.
        progress: called with the number of steps after each backward pass.

    Raises:
        KvtoolError: `usage`; `model-unsupported` for a model that cannot be differentiated, or whose
            evaluated steps come out otherwise when they run as blocks.
    """
    steps, how = plan.evaluated(prompt_length, len(tokens)), plan.drawn(prompt_length, len(tokens))
    uniforms = _uniforms(plan, tokens)  # [S, T]
    arrays: dict[int, Tensor] = {}
    for start in range(steps.start, how.targets[1], how.block):
        stop = min(start + how.block, steps.stop)
        cuts = [start, *([prompt_length] if start < prompt_length < stop else []), stop]
        rest = None if stop >= how.targets[1] else feed.fork()
        if stop > how.targets[0]:
            targets = range(max(start, how.targets[0]), min(stop, how.targets[1]))
            numbers = uniforms[:, targets.start : targets.stop]
            blocks = _block(model, feed, tokens, cuts, targets, numbers, plan.probe, geometries, ran)
            for layer, block in blocks.items():
                if layer not in arrays:
                    arrays[layer] = block.new_zeros(*block.shape[:2], len(steps), block.shape[3])
                offset = start - steps.start
                arrays[layer][:, :, offset : offset + block.shape[2]] = block
        if progress is not None:
            progress(how.draws * (stop - start))
        if rest is not None:
            for low, high in itertools.pairwise(cuts):
                rest.push(tokens[low:high])
            feed = rest
    return Drawn(how, torch.arange(steps.start, steps.stop), arrays, uniforms[:, how.targets[0] : how.targets[1]])


def _block(
    model: Any,
    feed: Feed,
    tokens: list[int],
    cuts: list[int],
    targets: range,
    uniforms: Tensor,
    probe: Probe,
    geometries: Mapping[int, Geometry],
    ran: Mapping[int, KeptOutputs],
) -> dict[int, Tensor]:
    """Gradients [S, H, n, Dv] of one block's steps, by layer.

    Steps behind the last target may be missing.

    Args:
        cuts: the block's first step, where its forwards meet, and the step behind its last.
        targets: steps of the block whose next token is drawn.
        uniforms: [S, targets] numbers in [0, 1) that decide the draws.
    """
    zeros = _Zeros(geometries)
    parts: list[Tensor] = []
    with observed(model, zeros):
        for low, high in itertools.pairwise(cuts):
            if low >= targets.stop:
                break
            first = min(max(low, targets.start), high)  # the part's first target, `high` if it has none
            logits = feed.graph(tokens[low:high], max(high - first, 1))
            parts.append(logits[: max(min(high, targets.stop) - first, 0)])
    _hold_against_run(zeros, geometries, range(cuts[0], min(feed.length, targets.stop)), ran)
    logits = torch.cat(parts)  # [targets, V]
    if not logits.requires_grad:
        raise _not_differentiable(model, "its logits carry no gradient")
    wanted = [zero for layer in geometries for zero in zeros.added[layer]]
    found: dict[int, list[Tensor]] = {layer: [] for layer in geometries}
    for draw, slope in enumerate(cotangents(probe, logits, uniforms)):
        keep_graph = draw < len(uniforms) - 1
        try:
            grads = torch.autograd.grad(logits, wanted, slope, retain_graph=keep_graph, allow_unused=True)
        except RuntimeError as error:
            raise _not_differentiable(model, " ".join(str(error).split())[:200]) from error
        each = iter(grads)
        for layer in geometries:
            pieces = [(zero, next(each)) for zero in zeros.added[layer]]
            if pieces[-1][1] is None:
                raise _not_differentiable(model, f"nothing leads from layer {layer} to its logits")
            # What an earlier forward's last layer gave leads nowhere where no token is drawn behind it.
            whole = [torch.zeros_like(zero[0]) if piece is None else piece[0] for zero, piece in pieces]
            found[layer].append(torch.cat(whole).transpose(0, 1))
    return {layer: torch.stack(grads) for layer, grads in found.items()}


def _uniforms(plan: GradientPlan, tokens: list[int]) -> Tensor:
    """[S, T] float64: a function of seed, sequence, draw and step alone."""
    drawn = []
    for draw in range(plan.draws):
        text = f"gradients:{plan.seed}:{draw}:{','.join(map(str, tokens))}"
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
        drawn.append(torch.rand(len(tokens), dtype=torch.float64, generator=torch.Generator().manual_seed(seed)))
    return torch.stack(drawn)


def _hold_against_run(zeros: _Zeros, layers: Iterable[int], steps: range, ran: Mapping[int, KeptOutputs]) -> None:
    """The attention outputs of a block's `steps` are those of the run, up to rounding, a few rows at a time.

    A long block must not hide rows that are off behind many that are not.
    """
    for layer in layers:
        theirs = ran[layer].of(steps)  # [n, H, Dv]
        mine = torch.cat(zeros.outputs[layer])[: len(steps)]
        for found, expected in zip(mine.split(_HELD_ROWS), theirs.split(_HELD_ROWS), strict=True):
            error = float((found.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30))
            if not error <= _ROUNDING[mine.dtype]:
                raise KvtoolError(
                    "model-unsupported",
                    f"the model computes other attention outputs when the evaluated steps run as blocks: those of "
                    f"layer {layer} are off by {error:.2g}",
                    "--gradient-block 1 repeats the steps of a generation one by one, a run without --chunk reads "
                    "the prompt as one block; or capture without --gradients",
                )


def _not_differentiable(model: Any, reason: str) -> KvtoolError:
    return KvtoolError(
        "model-unsupported",
        f"{type(model).__name__} cannot be differentiated by its attention outputs: {reason}",
        "capture without --gradients",
    )
