"""Shape checks at public doors: named dimensions that must agree with each other."""

from __future__ import annotations

from typing import Any

from kvtool.errors import KvtoolError


def expect_shapes(**arrays: tuple[Any, str]) -> dict[str, int]:
    """Bind dimension names to sizes across several arrays.

    Args:
        arrays: name -> (array with `.shape`, names of its dimensions such as "Hk N D";
            a number instead of a name is that very size). None as array is skipped.

    Returns:
        The size of every dimension name.

    Raises:
        KvtoolError: code `shape`, naming the array and both shapes.
    """
    sizes: dict[str, int] = {}
    for name, (array, dims) in arrays.items():
        if array is None:
            continue
        names = dims.split()
        shape = tuple(int(n) for n in array.shape)
        if len(shape) != len(names):
            raise KvtoolError("shape", f"{name} has shape {list(shape)}, expected [{', '.join(names)}]")
        for dim, size in zip(names, shape, strict=True):
            expected = int(dim) if dim.isdigit() else sizes.setdefault(dim, size)
            if expected != size:
                known = "" if dim.isdigit() else f" with {dim} = {expected}"
                raise KvtoolError("shape", f"{name} has shape {list(shape)}, expected [{', '.join(names)}]{known}")
    return sizes
