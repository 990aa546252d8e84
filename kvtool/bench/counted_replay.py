"""Counted replay: `kvtool replay` as it is, with a CPU clock around the operations and around Policy.score.

It runs in a process of its own (see PROGRAM), so that all of its CPU seconds, imports included, are those of one
replay. Calls inside other calls are counted once, as the outermost.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import pkgutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

# What `python -c` runs, with the file for the counts and the arguments of `kvtool` behind it.
PROGRAM = (
    "import sys; from kvtool.bench.counted_replay import counted; from kvtool.cli.main import run; "
    "sys.exit(counted(run, sys.argv[1], sys.argv[2:]))"
)
OPERATIONS = ("retained_attention", "attention_mass", "leverage", "tangent")


class Counter:
    """CPU seconds by name."""

    def __init__(self, clock: Callable[[], float] = time.process_time) -> None:
        self.seconds: dict[str, float] = {}
        self._clock = clock
        self._inside = False

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, and what its generator does, counted as `name`."""

        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return function(*args, **kwargs)
            found = self._timed(name, function, *args, **kwargs)
            return self._stepwise(name, found) if inspect.isgenerator(found) else found

        return counted

    def _timed(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._inside, begun = True, self._clock()
        try:
            return function(*args, **kwargs)
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + self._clock() - begun
            self._inside = False

    def _stepwise(self, name: str, generator: Iterator[Any]) -> Iterator[Any]:
        end, advance = object(), self.around(name, next)
        while (item := advance(generator, end)) is not end:
            yield item


def import_everything() -> list[ModuleType]:
    """Every module of kvtool that a replay may use, loaded, the kernels' own apart."""
    for name in ("kvtool.metrics", "kvtool.policies", "kvtool.replay"):
        package = importlib.import_module(name)
        for found in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{name}.{found.name}")
    return [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("kvtool.") and not name.startswith("kvtool.kernels")
    ]


def operation_of(value: Any) -> str | None:
    """The operation that a function belongs to, None for anything else."""
    if not inspect.isfunction(value):
        return None
    parts = value.__module__.split(".")
    return parts[2] if parts[:2] == ["kvtool", "kernels"] and len(parts) > 2 and parts[2] in OPERATIONS else None


def count_calls(counter: Counter, modules: list[ModuleType]) -> None:
    """Put the counter around the operations, wherever kvtool calls them, and around every policy's score."""
    from kvtool.policies import Policy

    for module in modules:
        for name, value in list(vars(module).items()):
            operation = operation_of(value)
            if operation is not None:
                setattr(module, name, counter.around(operation, value))
    policies = [Policy]
    while policies:
        cls = policies.pop()
        policies += cls.__subclasses__()
        if "score" in vars(cls):
            cls.score = counter.around("score", vars(cls)["score"])  # type: ignore[method-assign]


def counted(command: Callable[[list[str]], int], counts: str, arguments: list[str]) -> int:
    """Run the command line; write {name: seconds} to the file `counts`, and how long everything before took."""
    counter = Counter()
    count_calls(counter, import_everything())
    imported = time.process_time()
    code = command(arguments)
    Path(counts).write_text(json.dumps({"inside": counter.seconds, "imports": imported}))
    return code
