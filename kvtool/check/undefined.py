"""Undefined: how many values a mean leaves out. With more of them a regression would read as better."""

from __future__ import annotations

# Columns of cells that count for another column of cells what its mean leaves out.
COUNTED_BY: dict[str, str] = {"mean_output_error": "undefined_heads", "mean_layer_error": "undefined_layers"}
SUFFIX = ":undefined"  # no column has a colon in its name
_COUNTS = {count: column for column, count in COUNTED_BY.items()}


def counted_column(name: str) -> str | None:
    """The column whose undefined values `name` counts; None where it counts none."""
    if name.endswith(SUFFIX):
        return name.removesuffix(SUFFIX)
    return _COUNTS.get(name)
