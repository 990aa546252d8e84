"""Stopwatch: how long the stages of a piece of work take, where somebody watches."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator
from contextvars import ContextVar

_watch: ContextVar[dict[str, float] | None] = ContextVar("kvtool_stopwatch", default=None)


@contextlib.contextmanager
def watching() -> Iterator[dict[str, float]]:
    """Collect the seconds of every `stage` inside, by name; a stage inside another is taken out of the outer one."""
    seconds: dict[str, float] = defaultdict(float)
    token = _watch.set(seconds)
    try:
        yield seconds
    finally:
        _watch.reset(token)


@contextlib.contextmanager
def stage(name: str) -> Iterator[None]:
    """Time what is inside as `name`, wall clock. Costs next to nothing where nobody watches."""
    outer = _watch.get()
    if outer is None:
        yield
        return
    inner: dict[str, float] = defaultdict(float)
    token = _watch.set(inner)
    begun = time.perf_counter()
    try:
        yield
    finally:
        elapsed = time.perf_counter() - begun
        _watch.reset(token)
        outer[name] += elapsed - sum(inner.values())
        for other, seconds in inner.items():
            outer[other] += seconds
