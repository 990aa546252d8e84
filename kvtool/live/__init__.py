"""Live: the closed loop. Evict in the real model's cache, as replay decides, and measure what the model then says.

`kvtool.live` is both this package and, called, the function `live`: the package of a name and the
function of that name would otherwise hide each other.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from kvtool.live.run import live

__all__ = ["live"]


class _CallablePackage(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return live(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage
