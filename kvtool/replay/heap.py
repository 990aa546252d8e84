"""Heap: memory that is free inside this process goes back to the system."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable


@functools.cache
def _trimmer() -> Callable[[int], int] | None:
    """malloc_trim of the C library; None where it has none (it is GNU's own)."""
    with contextlib.suppress(OSError, AttributeError):
        found: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
        return found
    return None


def trim() -> None:
    """Give back what is free. GNU's allocator keeps large blocks that lie below a small one in use: after a policy
    that computed in many temporaries that was half a gigabyte of a long layer."""
    if (trimmer := _trimmer()) is not None:
        trimmer(0)
