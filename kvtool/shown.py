"""Shown: a copy of what a plug-in is shown, and whether it wrote into it, whichever way it took."""

from __future__ import annotations

import copy
import dataclasses
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def copied(value: T) -> T:
    """`value` with tensors, lists, dictionaries and dataclasses of its own, all the way down.

    PyTorch counts in-place changes, and NumPy, which sees the same memory, does not: only a copy is safe.
    """
    found: object = value
    if isinstance(value, Tensor):
        found = value.detach().clone()
    elif isinstance(value, dict):
        found = {key: copied(one) for key, one in value.items()}
    elif isinstance(value, list):
        found = [copied(one) for one in value]
    elif isinstance(value, tuple):
        parts = [copied(one) for one in value]
        found = type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        found = copy.copy(value)
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        for name in {*names, *getattr(value, "__dict__", ())}:  # of a frozen one too
            object.__setattr__(found, name, copied(getattr(value, name)))
    return found  # type: ignore[return-value]


def unchanged(shown: object, kept: object) -> bool:
    """Whether `shown` still is, bit for bit, what `kept` is that it was copied from."""
    if type(shown) is not type(kept):
        return False
    if isinstance(shown, Tensor) and isinstance(kept, Tensor):
        return (shown.dtype, shown.shape) == (kept.dtype, kept.shape) and torch.equal(_bits(shown), _bits(kept))
    if isinstance(shown, dict) and isinstance(kept, dict):
        return shown.keys() == kept.keys() and all(unchanged(one, kept[key]) for key, one in shown.items())
    if isinstance(shown, list | tuple) and isinstance(kept, list | tuple):
        return len(shown) == len(kept) and all(unchanged(*pair) for pair in zip(shown, kept, strict=True))
    if dataclasses.is_dataclass(shown) and not isinstance(shown, type):
        fields = [field.name for field in dataclasses.fields(shown)]  # what a property remembers is no change
        return all(unchanged(getattr(shown, name), getattr(kept, name)) for name in fields)
    return shown is kept or shown == kept or (shown != shown and kept != kept)


def _bits(values: Tensor) -> Tensor:
    """The bytes of a tensor: NaN is equal to itself there, and 0 is not -0."""
    flat = torch.empty(values.numel(), dtype=values.dtype, device=values.device)  # strides that `view` takes
    return flat.copy_(values.detach().reshape(-1)).view(torch.uint8)
