"""Bench: how fast kvtool is here, as ratios to plain torch and to floors, measured side by side.

`kvtool.bench` is both this package and, called, the function `bench`.
"""

from kvtool.bench.run import Bench, bench
from kvtool.doors import callable_package

__all__ = ["Bench", "bench"]

callable_package(__name__, bench)
