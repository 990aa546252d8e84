"""Synth: traces with known structure and a known right answer, one construction a file.

`kvtool.synth` is both this package and, called, the function `synth`.
"""

from kvtool.doors import callable_package
from kvtool.synth.api import synth

__all__ = ["synth"]

callable_package(__name__, synth)
