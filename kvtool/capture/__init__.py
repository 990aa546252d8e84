"""Capture: run a model once and record queries, keys and values of every attention layer.

`kvtool.capture` is both this package and, called, the function `capture`.
"""

from kvtool.capture.api import capture
from kvtool.doors import callable_package

__all__ = ["capture"]

callable_package(__name__, capture)
