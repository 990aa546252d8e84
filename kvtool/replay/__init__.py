"""Replay: run policies on a trace and measure what eviction does. Never imports transformers.

`kvtool.replay` is both this package and, called, the function `replay`.
"""

from kvtool.doors import callable_package
from kvtool.replay.run import replay

__all__ = ["replay"]

callable_package(__name__, replay)
