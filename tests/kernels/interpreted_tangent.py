"""Tangents under Triton's interpreter, against the float64 reference; a function returns what a test asserts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvtool.kernels.device import find_card, using
from kvtool.kernels.tangent import Tangent, reference, tangent_at


def scene(heads: int, tokens: int, shifts: int, width: int, values: int, dtype: str) -> list[Tensor]:
    """Centre, keys, directions, shifts. Keys have a part in common, so that the softmax's competition cancels it."""
    kind = getattr(torch, dtype)
    centre = torch.randn(heads, width, dtype=torch.float64)
    keys = torch.randn(tokens, width, dtype=torch.float64) + 0.5
    directions = torch.randn(tokens, values, dtype=torch.float64)
    shift = torch.randn(heads, shifts, width, dtype=torch.float64)
    return [array.to(kind) for array in (centre, keys, directions, shift)]


def both_ways(arrays: list[Tensor], how: dict[str, Any]) -> tuple[Tangent, Tangent, dict[str, Any]]:
    with using(find_card("interpreter")) as running:
        found = tangent_at(*arrays[:3], **how)
    true = reference.tangent_at(*(array.to(torch.float64) for array in arrays[:3]), **how)
    assert running is not None
    return found, true, running.log.counts["tangent"]


def worst(found: Tensor, true: Tensor) -> float:
    """The largest error of any row, relative to that row's length; infinite for NaN."""
    error = (found.to(torch.float64) - true).norm(dim=-1) / true.norm(dim=-1)
    return float(error.nan_to_num(torch.inf).max()) if error.numel() else 0.0


def parity(cases: list[list[Any]]) -> list[dict[str, Any]]:
    answers = []
    for *shape, softcap, sinks in cases:
        arrays = scene(*shape)
        sink_logits = torch.randn(shape[0], dtype=torch.float64) if sinks else None
        how = {"scale": 1.7 * shape[3] ** -0.5, "softcap": softcap, "sink_logits": sink_logits}
        found, true, log = both_ways(arrays, how)
        shift, wide = arrays[3], arrays[3].to(torch.float64)
        both = found.both(shift)  # type: ignore[attr-defined]
        errors = {
            "full": worst(both[0], true.full(wide)),
            "diagonal": worst(both[1], true.diagonal(wide)),
            "full again": worst(found.full(shift), true.full(wide)),
            "diagonal again": worst(found.diagonal(shift), true.diagonal(wide)),
            "J": worst(found.full_matrix(), true.full_matrix()),
            "JD": worst(found.diagonal_matrix(), true.diagonal_matrix()),
            "output": worst(found.output, true.output),
            "weights": worst(found.weights, true.weights),
            "slopes": worst(found.slopes, true.slopes),
            "sink": float((found.sink_weight - true.sink_weight).abs().max()),
        }
        same = found.keys is arrays[1] and found.directions is arrays[2]
        answers.append({"errors": errors, "log": log, "same arrays": same, "dtype": str(both[0].dtype)})
    return answers


def one_wrong_number() -> list[float]:
    """How far J dq or JD dq moves when one number of the last token, channel or head moves by 1 %."""
    arrays, sinks = scene(3, 63, 5, 24, 40, "float64"), torch.randn(3, dtype=torch.float64)
    how = {"scale": 0.3, "softcap": 5.0}
    plain = both_ways(arrays, {**how, "sink_logits": sinks})[0].both(arrays[3])  # type: ignore[attr-defined]
    moved = []
    for which in range(5):
        centre, keys, directions, shift = (array.clone() for array in arrays)
        logits = sinks.clone()
        (centre[2, 23:], keys[62, 23:], directions[62, 39:], shift[2, 4, 23:], logits[2:])[which].mul_(1.01)
        changed, _, _ = both_ways([centre, keys, directions], {**how, "sink_logits": logits})
        both = changed.both(shift)  # type: ignore[attr-defined]
        moved.append(max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(both, plain, strict=True)))
    return moved


def edges() -> dict[str, Any]:
    """No token, one token, no shift, a token that holds all weight, and arrays wider than the kernel."""
    how: dict[str, Any] = {"scale": 1.0}
    answers: dict[str, Any] = {}
    for name, tokens in (("none", 0), ("one", 1)):
        arrays = scene(2, tokens, 3, 16, 16, "float32")
        found, true, _ = both_ways(arrays, how)
        shift = arrays[3].to(torch.float64)
        full, diagonal = found.both(arrays[3])  # type: ignore[attr-defined]
        answers[name] = [
            float((full - true.full(shift)).abs().max()),
            float((diagonal - true.diagonal(shift)).abs().max()),
            float((found.output - true.output).abs().max()),
        ]
    arrays = scene(2, 20, 0, 16, 24, "float32")
    found, _, _ = both_ways(arrays, how)
    answers["no shift"] = list(found.full(arrays[3]).shape)
    centre, keys, directions, shift = scene(1, 40, 4, 16, 16, "float64")
    keys[11] = centre[0] * 100 / centre[0].square().sum()  # a logit of 100
    found, true, _ = both_ways([centre, keys, directions], how)
    answers["sharp"] = [worst(found.full(shift), true.full(shift)), worst(found.diagonal(shift), true.diagonal(shift))]
    arrays = scene(1, 5, 2, 300, 16, "float32")
    _, _, log = both_ways(arrays, how)
    answers["wide"] = log
    return answers
