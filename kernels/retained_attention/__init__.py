"""Retained attention: what is left of attention's output where tokens left the cache."""

from kvtool.kernels.device import door
from kvtool.kernels.retained_attention import errors

__all__ = ["cell_errors"]

cell_errors = door("retained_attention", errors.cell_errors)
