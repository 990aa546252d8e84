"""Around a Triton kernel of attention: arguments that fit, and which tiles of keys a block of queries can see."""

from __future__ import annotations

import torch
from torch import Tensor

from kvtool.kernels.device.running import Unsupported

STORED = (torch.bfloat16, torch.float16, torch.float32)
LARGEST = 2**31 - 1
WIDEST = 256  # numbers of a key or value: more would not stay in registers


def expect_fitting(
    arrays: dict[str, Tensor], numbers: dict[str, tuple[Tensor, tuple[int, ...]]], softcap: float | None
) -> None:
    """One sentence where the arguments of a kernel do not fit.

    Args:
        arrays: queries [H, R, D], keys [Hk, N, D] and perhaps values [Hk, N, Dv], of one dtype.
        numbers: integer tensors with the shape that each must have.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.
        Unsupported: float64, or a head dimension that there is no kernel for.
    """
    queries, keys = arrays["queries"], arrays["keys"]
    for name, array in arrays.items():
        if array.ndim != 3:
            raise ValueError(f"{name} has shape {list(array.shape)}, expected three dimensions")
        if array.dtype == torch.float64:
            raise Unsupported("float64 was asked for, and the kernel is float32")
        if array.shape[2] > WIDEST:
            raise Unsupported(f"{name} of {array.shape[2]} numbers are wider than {WIDEST}")
        if array.dtype not in STORED or array.dtype != queries.dtype:
            raise ValueError(f"{name} is {array.dtype}; all must be float32, or all bfloat16, or all float16")
        if array.device != queries.device:
            raise ValueError(f"{name} is on {array.device} and the queries are on {queries.device}")
    values = arrays.get("values", keys)
    if keys.shape[2] != queries.shape[2] or values.shape[:2] != keys.shape[:2]:
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in arrays.items())
        raise ValueError(f"{shapes} do not fit")
    if keys.shape[0] == 0 or queries.shape[0] % keys.shape[0]:
        raise ValueError(f"{queries.shape[0]} query heads cannot share {keys.shape[0]} KV heads evenly")
    for name, (array, shape) in numbers.items():
        if tuple(array.shape) != shape or array.is_floating_point():
            raise ValueError(f"{name} has shape {list(array.shape)}, expected {list(shape)} integers")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap {softcap} is not above 0")


def as_int32(array: Tensor) -> Tensor:
    """Contiguous, in 32 bits; what is beyond them stays beyond every row."""
    clamped: Tensor = array.clamp(-LARGEST - 1, LARGEST)
    return clamped.to(torch.int32).contiguous()


def in_blocks(array: Tensor, size: int, largest: bool) -> Tensor:
    """[..., blocks] maximum or minimum of every run of `size` of the last axis, the last run perhaps shorter."""
    count = array.shape[-1]
    blocks = -(-count // size)
    padding = array[..., -1:].expand(*array.shape[:-1], blocks * size - count)
    runs = torch.cat([array, padding], -1).unflatten(-1, (blocks, size))
    found: Tensor = runs.amax(-1) if largest else runs.amin(-1)
    return found


def meeting(low: Tensor, high: Tensor, others_low: Tensor, others_high: Tensor) -> tuple[Tensor, Tensor]:
    """For every interval low..high [..., a] the run of the other intervals [..., b] that holds all that meet it.

    Returns:
        first and last + 1 of the run, int32 [..., a]; both 0 where none meets it.
    """
    met = (others_high[..., None, :] >= low[..., None]) & (others_low[..., None, :] <= high[..., None])  # [..., a, b]
    place = torch.arange(met.shape[-1], dtype=torch.int32, device=met.device)
    some = met.any(-1)
    first = torch.where(met, place, met.shape[-1]).amin(-1)
    last = torch.where(met, place, -1).amax(-1)
    return torch.where(some, first, 0).to(torch.int32), torch.where(some, last + 1, 0).to(torch.int32)


def pieces(dim: int) -> tuple[int, int]:
    """A head dimension up to 256 as two powers of two from 16 to 128, the second perhaps 0: 80 = 64 + 16."""
    first = min(128, max(16, 1 << (dim.bit_length() - 1)))
    rest = dim - first
    return first, 0 if rest <= 0 else max(16, power_of_two(rest))


def power_of_two(dim: int) -> int:
    """The smallest power of two that is not below `dim`."""
    return 1 << max(0, dim - 1).bit_length()
