"""Landmarks: rows of a sequence that have a name, and what a synthetic sequence says of itself."""

from __future__ import annotations

import math
from typing import Any

from kvtool.errors import KvtoolError
from kvtool.trace.attributes import Fields

SYNTHETIC_FIELDS = ("name", "seed", "answer", "depth")
MOST_LANDMARKS = 1000


def check_landmarks(values: Any, where: str, length: int) -> None:
    """`landmarks` maps names to rows, ascending and inside the sequence; None where there are none.

    Raises:
        KvtoolError: code `trace-unsafe`.
    """
    if values is None:
        return
    if not isinstance(values, dict) or not 0 < len(values) <= MOST_LANDMARKS or "" in values:
        raise KvtoolError("trace-unsafe", f"{where} has landmarks that are no object of 1 to {MOST_LANDMARKS} names")
    for name, rows in values.items():
        if not name.isprintable():  # it goes to terminals
            raise KvtoolError("trace-unsafe", f"{where} has a landmark whose name is not printable: {name[:40]!r}")
        whole = isinstance(rows, list) and all(isinstance(r, int) and not isinstance(r, bool) for r in rows)
        if not whole or not rows or rows != sorted(set(rows)) or rows[0] < 0 or rows[-1] >= length:
            raise KvtoolError(
                "trace-unsafe",
                f"{where} has a landmark {name[:40]!r} whose rows are no ascending list within 0 to {length - 1}",
            )


def check_synthetic(values: Any, where: str) -> None:
    """`synthetic` says which construction a sequence is, with which seed, and what the right answer is.

    Raises:
        KvtoolError: code `trace-unsafe`.
    """
    if values is None:
        return
    fields = Fields(values, SYNTHETIC_FIELDS, f"{where}: synthetic")
    for name in ("name", "answer"):
        fields.require(name)
        if not isinstance(fields.values[name], str) or not fields.values[name] or not fields.values[name].isprintable():
            raise fields.fault(f"has {name} that is no printable text")
    seed = fields.values.get("seed")
    if seed is None or isinstance(seed, bool) or not isinstance(seed, int):
        raise fields.fault("has a seed that is no whole number")
    depth = fields.number("depth")
    if depth is not None and not (math.isfinite(depth) and 0 <= depth <= 1):
        raise fields.fault(f"has the depth {depth:g}, expected 0 to 1")
