"""Heap: memory that is free inside this process goes back to the system."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator

M_MMAP_THRESHOLD = -3  # malloc.h
LARGE_BYTES = 8 << 20  # of a block that goes back when it is freed, whatever lies above it
USUAL_BYTES = 32 << 20  # what the allocator's own rule ends at


@contextlib.contextmanager
def large_blocks_apart(wanted: bool) -> Iterator[None]:
    """Inside, GNU's allocator maps every large block by itself, and gives it back when it is freed.

    Left alone it raises the size from which it does so to that of the largest block that was freed, up to 32 MB: just
    above an array of one head of a long layer. Then such arrays lie in one heap, and depending on the order in which
    they are freed, up to 0.2 GB of it stays until the next `trim`. It costs system time (a fifth of a 32k layer's CPU
    time if all of it were done so), so it is for where memory is at its peak.
    """
    with contextlib.suppress(OSError, AttributeError):
        if wanted:
            ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)
    try:
        yield
    finally:
        with contextlib.suppress(OSError, AttributeError):
            if wanted:
                ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, USUAL_BYTES)


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
