"""Live: the closed loop. Evict in the real model's cache, as replay decides, and measure what the model then says.

`kvtool.live` is both this package and, called, the function `live`.
"""

from kvtool.doors import callable_package
from kvtool.live.run import live

__all__ = ["live"]

callable_package(__name__, live)
