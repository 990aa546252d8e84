"""Leverage under Triton's interpreter, against the float64 reference; a function returns what a test asserts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvtool.kernels.device import find_card, using
from kvtool.kernels.leverage import LeverageError, leverage_scores, reference
from kvtool.kernels.leverage import triton as kernels

Case = tuple[Tensor, Tensor, Tensor, float, Tensor | None]


def scene(heads: int, sets: int, tokens: int, width: int, dtype: str, loose: bool) -> Case:
    """Directions, weights, ridge, weight_eps, loose."""
    u = torch.randn(sets, tokens, width, dtype=torch.float64).to(getattr(torch, dtype))
    weights = torch.rand(heads, tokens, dtype=torch.float64).square()
    ridge = 0.5 + torch.rand(heads, dtype=torch.float64)
    return u, weights, ridge, 1e-3, torch.randn(heads, width, dtype=torch.float64) if loose else None


def on_card(case: Case) -> tuple[Any, dict[str, Any]]:
    with using(find_card("interpreter")) as running:
        found = leverage_scores(*case)
    assert running is not None
    return found, running.log.counts["leverage"]


def worst(found: Tensor, true: Tensor) -> float:
    """The largest error of any token's score, relative to that score; infinite for NaN."""
    error = ((found - true).abs() / true).nan_to_num(torch.inf)
    return float(error.max())


def parity(cases: list[list[Any]]) -> list[dict[str, Any]]:
    answers = []
    for case in (scene(*one) for one in cases):
        found, log = on_card(case)
        true = reference.leverage_scores(*case)
        rho = float((found.rho - true.rho).abs().max())
        answers.append({"worst": worst(found.scores, true.scores), "rho": rho, "log": log})
    return answers


def one_wrong_number() -> list[float]:
    """How far scores move when one weight, one coordinate or the loose direction moves by 1 %."""
    u, weights, ridge, eps, loose = scene(2, 1, 111, 24, "float64", True)
    plain, _ = on_card((u, weights, ridge, eps, loose))
    moved = []
    for which in range(4):
        v, w, r, x = u.clone(), weights.clone(), ridge.clone(), loose.clone()
        (v[0, 110, 23:], w[1, 110:], r[1:], x[1, 23:])[which].mul_(1.01)
        found, _ = on_card((v, w, r, eps, x))
        moved.append(worst(found.scores, plain.scores))
    return moved


def handed_over() -> dict[str, Any]:
    """Head 1's directions lie on a line and its ridge is tiny; head 2 has one token that outweighs all."""
    u = torch.randn(3, 120, 16, dtype=torch.float64)
    u[1] = u[1, :1] * torch.randn(120, 1, dtype=torch.float64)
    u[2, 7] *= 1e4
    case = (u, torch.rand(3, 120, dtype=torch.float64) + 0.1, torch.tensor([1.0, 1e-9, 1.0]).double(), 0.0, None)
    found, log = on_card(case)
    true = reference.leverage_scores(*case)
    return {
        "worst": [worst(a, b) for a, b in zip(found.scores, true.scores, strict=True)],
        "jitter": [found.jitter.tolist(), true.jitter.tolist()],
        "log": log,
    }


def no_factor() -> list[Any]:
    """The head that a reference error names, and its text against the reference's own."""
    u, weights, ridge, eps, _ = scene(4, 2, 120, 16, "float64", False)
    weights[2, 5] = torch.nan
    said = []
    for run in (lambda case: on_card(case), lambda case: reference.leverage_scores(*case)):
        try:
            run((u, weights, ridge, eps, None))
        except LeverageError as error:
            said.append([error.head, str(error)])
    return said


def scales() -> list[dict[str, Any]]:
    """Weights and ridge far outside float32's range, and a channel a thousand times the others."""
    u, weights, _, _, _ = scene(2, 1, 200, 24, "float64", False)
    answers = []
    for size, channel in ((1e-60, 1.0), (1e60, 1.0), (1.0, 1e3)):
        v = u.clone()
        v[:, :, 5] *= channel
        case = (v, weights * size, torch.full((2,), size, dtype=torch.float64), 0.0, None)
        found, log = on_card(case)
        answers.append({"worst": worst(found.scores, reference.leverage_scores(*case).scores), "log": log})
    return answers


def accepted() -> list[dict[str, Any]]:
    """Heads of ever worse spectra: what is not handed over must be right to within a near tie."""
    answers = []
    for kind in ("tokens", "channels", "low rank", "offset", "few"):
        for power in (0, 1, 2, 3):
            u, weights, ridge, _, _ = scene(1, 1, 300, 24, "float64", False)
            if kind == "tokens":
                u[:, :3] *= 10.0**power
            elif kind == "channels":
                u = (u * 10.0 ** (-power * torch.linspace(0, 1, 24))) @ torch.linalg.qr(torch.randn(24, 24).double())[0]
                u, ridge = u * 10, ridge * 10.0**-power
            elif kind == "low rank":
                u = u[:, :, :6] @ torch.randn(6, 24).double() * 10.0 ** (power / 2) + 0.03 * u
            elif kind == "few":
                u, weights = u[:, :12], weights[:, :12] * 10.0**power
            else:
                u = 0.1 * u + 10.0 ** (power - 1) * torch.randn(24).double()
            case = (u, weights + 0.01, ridge, 0.0, None)
            found, log = on_card(case)
            error = worst(found.scores, reference.leverage_scores(*case).scores)
            answers.append({"kind": kind, "power": power, "worst": error, "handed": bool(log["reasons"])})
    return answers


def shapes() -> list[Any]:
    """No tokens; and directions too wide for the kernel, which the CPU does."""
    none, _ = on_card(scene(2, 1, 0, 16, "float64", False))
    case = scene(1, 1, 20, kernels.WIDEST + 1, "float64", False)
    wide, log = on_card(case)
    return [list(none.scores.shape), bool(torch.equal(wide.scores, reference.leverage_scores(*case).scores)), log]
