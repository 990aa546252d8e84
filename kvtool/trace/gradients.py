"""Gradients in a trace: how they were drawn as JSON, held against the arrays, and rounded to the stored dtype."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, cast

import torch
from torch import Tensor

from kvtool.errors import KvtoolError
from kvtool.layer import MOST_DRAWS, Gradients
from kvtool.trace.attributes import Fields
from kvtool.trace.layout import dtype_name, layer_path
from kvtool.trace.metadata import Tree

GRADIENT_FIELDS = ("draws", "block", "at", "targets", "steps", "seed")
PROBE = "probe"  # absent where tokens were drawn
MOST_LOSS = 0.01  # relative L2 that rounding may cost one draw of one layer


def gradient_attributes(gradients: Gradients) -> dict[str, Any]:
    """The sequence attribute `gradients`."""
    return {
        "draws": gradients.draws,
        "block": gradients.block,
        "at": gradients.at,
        "targets": list(gradients.targets),
        "steps": gradients.steps,
        "seed": gradients.seed,
        PROBE: gradients.probe,
    }


def drawn(attributes: Mapping[str, Any]) -> str:
    """How gradients were drawn, in words, of the sequence attribute `gradients`."""
    (low, high), draws = attributes["targets"], attributes["draws"]
    what = f"{draws} draw{'s' * (draws != 1)} of {attributes['probe']} behind steps {low}:{high}"
    return f"{what} ({attributes['at']}, blocks of {attributes['block']})"


def parse_gradients(values: Any, where: str, length: int, prompt_length: int) -> Gradients | None:
    """The sequence attribute `gradients` read back; None where there is none.

    Args:
        length: T; targets lie in 0 to T.
        prompt_length: rows of the prompt, which divides the steps that may have gradients.

    Raises:
        KvtoolError: code `trace-unsafe`.
    """
    if values is None:
        return None
    fields = Fields(values, (*GRADIENT_FIELDS, PROBE), f"{where}: gradients")
    for name in GRADIENT_FIELDS:
        fields.require(name)
    targets = fields.values["targets"]
    whole = isinstance(targets, list) and all(isinstance(x, int) and not isinstance(x, bool) for x in targets)
    if not whole or len(targets) != 2 or not 0 <= targets[0] < targets[1] <= length:
        raise fields.fault(f"has targets that are no half-open range of steps within 0 to {length}")
    gradients = Gradients(
        draws=cast(int, fields.whole("draws", 1, MOST_DRAWS)),
        block=cast(int, fields.whole("block", 1, length)),
        at=cast(Literal["continuation", "prompt", "all"], fields.word("at", ("continuation", "prompt", "all"))),
        targets=(targets[0], targets[1]),
        steps=cast(int, fields.whole("steps", 1, length)),
        seed=cast(int, fields.whole("seed", 0, (1 << 64) - 1)),
        probe=_probe(fields),
    )
    fault = targets_fault(gradients, length, prompt_length)
    if fault is not None:
        raise fields.fault(f"has {fault}")
    return gradients


def targets_fault(gradients: Gradients, length: int, prompt_length: int) -> str | None:
    """What is wrong with the targets of a sequence of `length` rows, or None."""
    low, high = gradients.targets
    allowed = _allowed(gradients, length, prompt_length)
    if gradients.steps != high - low:
        return f"steps {gradients.steps}, but the targets {low}:{high}"
    if not allowed.start <= low < high <= allowed.stop:
        return f"targets {low}:{high} outside {allowed.start}:{allowed.stop}, the steps at {gradients.at}"
    return None


def gradient_steps_fault(gradients: Gradients, steps: Tensor, length: int, prompt_length: int) -> str | None:
    """What is wrong with a layer's gradient steps [Tg], or None."""
    allowed, count = _allowed(gradients, length, prompt_length), steps.numel()
    first = int(steps[0]) if count else -1
    consecutive = torch.equal(steps.cpu(), torch.arange(first, first + count))
    if not count or not consecutive or not allowed.start <= first <= allowed.stop - count:
        return f"gradient steps that are not consecutive within {allowed.start}:{allowed.stop}"
    (low, high), stop = gradients.targets, first + count
    if not first <= low < high <= stop:
        return f"gradients of the steps {first}:{stop}, but the targets {low}:{high}"
    return _block_fault(gradients, count)


def _allowed(gradients: Gradients, length: int, prompt_length: int) -> range:
    """The steps that may have gradients."""
    first = prompt_length if gradients.at == "continuation" else 0
    return range(first, prompt_length if gradients.at == "prompt" else length)


def _block_fault(gradients: Gradients, count: int) -> str | None:
    if not 1 <= gradients.block <= count:
        return f"gradients of {count} steps, which are no blocks of {gradients.block}"
    return None


def _probe(fields: Fields) -> Literal["signs", "tokens"]:
    if fields.values.get(PROBE) is None:
        return "tokens"
    return cast(Literal["signs", "tokens"], fields.word(PROBE, ("signs", "tokens")))


def check_gradients(tree: Tree, index: int, layers: Iterable[int], gradients: Gradients | None) -> None:
    """Every layer's gradients are of as many draws and steps as the sequence says, and there are some if it says so.

    Raises:
        KvtoolError: code `trace-unsafe`, naming the layer.
    """
    found = {layer: tree.arrays.get(f"{layer_path(index, layer)}/output_gradients") for layer in layers}
    shapes = {layer: array.shape for layer, array in found.items() if array is not None}
    if gradients is not None and not shapes:
        raise KvtoolError("trace-unsafe", f"sequence {index} says how gradients were drawn, but no layer has any")
    for layer, (draws, _, count, _) in shapes.items():
        where = f"layer {layer} of sequence {index}"
        if gradients is None or draws != gradients.draws:
            said = "nothing" if gradients is None else f"{gradients.draws}"
            raise KvtoolError("trace-unsafe", f"{where} has gradients of {draws} draws, its sequence says {said}")
        fault = _block_fault(gradients, count)
        if fault is not None:
            raise KvtoolError("trace-unsafe", f"{where} has {fault}")


def stored_gradients(array: Tensor, dtype: torch.dtype, where: str, steps: Tensor) -> Tensor:
    """Gradients [S, H, Tg, Dv] rounded to the stored dtype, unscaled; refused where that would falsify them.

    Args:
        where: said in errors, such as `layer 7`.
        steps: [Tg] rows, likewise.

    Raises:
        KvtoolError: `not-finite`; `overflow`, also where rounding small numbers costs one draw more than 1 % (L2).
    """
    array = array.detach().cpu()
    stored = array.to(dtype)
    if not bool(torch.isfinite(stored).all()):
        draw, head, row, _ = (int(x) for x in (~torch.isfinite(stored)).nonzero()[0])
        place = f"the gradient of {where} in draw {draw}, head {head}, step {int(steps[row])}"
        if not bool(torch.isfinite(array).all()):
            raise KvtoolError(
                "not-finite", f"{place} is not finite", "a wider --model-dtype may hold it; capture without --gradients"
            )
        raise KvtoolError(
            "overflow",
            f"{place} is more than {dtype_name(dtype)} can hold",
            "store a wider dtype: --dtype float32 or bfloat16",
        )
    if stored.dtype != array.dtype:
        exact = array.to(torch.float64).flatten(1)  # [S, H·Tg·Dv]
        lost, norm = (stored.to(torch.float64).flatten(1) - exact).norm(dim=1), exact.norm(dim=1)
        if bool((lost > MOST_LOSS * norm).any()):
            draw = int((lost > MOST_LOSS * norm).nonzero()[0])
            raise KvtoolError(
                "overflow",
                f"the gradients of {where} are too small for {dtype_name(dtype)}: draw {draw} would lose "
                f"{float(lost[draw] / norm[draw]):.1%} of its length",
                "store a wider dtype: --dtype float32 or bfloat16",
            )
    return stored
