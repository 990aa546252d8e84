"""Check: hold what policies do on stored traces against a baseline, and say what moved.

`kvtool.check` is both this package and, called, the function `check`.
"""

from kvtool.check.outcome import Check
from kvtool.check.run import check
from kvtool.doors import callable_package

__all__ = ["Check", "check"]

callable_package(__name__, check)
