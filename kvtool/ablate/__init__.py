"""Ablate: which of a policy's choices matters, and which only together. Stands on replay.

`kvtool.ablate` is both this package and, called, the function `ablate`.
"""

from kvtool.ablate.run import ablate
from kvtool.doors import callable_package

__all__ = ["ablate"]

callable_package(__name__, ablate)
