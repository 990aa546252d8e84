"""Capture: run a model once and record queries, keys and values of every attention layer.

`kvtool.capture` is both this package and, called, the function `capture`: the package of a name
and the function of that name would otherwise hide each other.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from kvtool.capture.api import capture

__all__ = ["capture"]


class _CallablePackage(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return capture(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage
