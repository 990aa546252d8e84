"""Compare: two sides of the same measurement, and what parts them. Prints nothing, judges by stated tolerances."""

from kvtool.compare.results import Diff, diff

__all__ = ["Diff", "diff"]
