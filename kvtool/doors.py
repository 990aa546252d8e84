"""Doors: a package that is also the function of its name.

`kvtool.capture`, `kvtool.replay` and `kvtool.live` are packages, and Python binds a package to its
name on `kvtool` as soon as anything imports it; the function of that name would be hidden.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def callable_package(name: str, function: Callable[..., Any]) -> None:
    """Make the package `name` call `function`, and show its documentation."""

    class Door(ModuleType):
        @functools.wraps(function)
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

    sys.modules[name].__class__ = Door
