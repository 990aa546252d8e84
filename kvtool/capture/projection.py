"""Find the output projection by observation: the linear map whose input is the attention output itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a plain linear map: nn.Linear, or the Conv1D of GPT-2."""
    return type(module) is nn.Linear or type(module).__name__ == "Conv1D"


@contextmanager
def linear_traffic(modules: dict[int, nn.Module]) -> Iterator[dict[int, list[tuple[nn.Module, Tensor, Tensor]]]]:
    """Record (module, input, output) of every linear map below each attention module, by layer id."""
    traffic: dict[int, list[tuple[nn.Module, Tensor, Tensor]]] = {layer: [] for layer in modules}
    handles = []
    for layer, parent in modules.items():
        for module in parent.modules():
            if is_linear(module):

                def note(child: nn.Module, args: tuple[Any, ...], output: Any, layer: int = layer) -> None:
                    traffic[layer].append((child, args[0], output))

                handles.append(module.register_forward_hook(note))
    try:
        yield traffic
    finally:
        for handle in handles:
            handle.remove()


def per_head(module: nn.Module, heads: int, value_dim: int) -> Tensor:
    """The projection [H, Dv, M]: rows of head h are those its output meets."""
    weight: Tensor = module.weight.detach()  # type: ignore[assignment, operator, unused-ignore]
    # nn.Linear holds (out, in), Conv1D (in, out).
    weight = weight if type(module).__name__ == "Conv1D" else weight.T
    return weight.reshape(heads, value_dim, -1)


def find_projection(traffic: list[tuple[nn.Module, Tensor, Tensor]], output: Tensor) -> nn.Module | None:
    """The one linear map fed with exactly `output` [n, H, Dv], or None.

    None is the honest answer where a gate, a norm or a mixing stands between: then the heads'
    outputs do not add up through one matrix.
    """
    n, heads, value_dim = output.shape
    flat = output.reshape(1, n, heads * value_dim)
    found = []
    for module, given, result in traffic:
        if given.numel() != flat.numel() or not torch.equal(given.reshape(flat.shape), flat):
            continue
        matrix = per_head(module, heads, value_dim).reshape(heads * value_dim, -1)
        bias = getattr(module, "bias", None)
        again = flat.to(torch.float64) @ matrix.to(torch.float64)
        again = again if bias is None else again + bias.to(torch.float64)
        result = result.reshape(again.shape).to(torch.float64)
        tolerance = 1e-4 if output.dtype == torch.float32 else 2e-2
        if float((again - result).norm()) <= tolerance * float(result.norm()) + 1e-12:
            found.append(module)
    return found[0] if len(found) == 1 else None
