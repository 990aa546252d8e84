"""Digits: how a baseline writes numbers.

A float64 needs 17 digits to come back bit for bit, and its last ones change with the machine, so that two people
would rewrite each other's files. Twelve significant digits are a million times finer than any tolerance one would
choose in earnest and stay readable; tolerances are applied to what stands there.
"""

from __future__ import annotations

from collections.abc import Callable

DIGITS = 12
Number = float | int | None


def stored(value: Number) -> Number:
    """`value` as a baseline holds it: whole numbers as they are, others rounded to DIGITS significant digits."""
    if value is None or isinstance(value, int):
        return value
    return float(f"{value:.{DIGITS - 1}e}")


def steady(old: Number, new: Number, allows: Callable[[float, float], bool] = lambda old, new: True) -> Number:
    """What an update writes where `old` stood: `old` itself where the two are a few of its last digits apart, as
    another machine's rounding makes them. Lines that nobody moved stay as they are.

    Args:
        allows: whether the tolerance lets the difference pass; what it calls worse must be written, or the next
            check fails again.
    """
    if isinstance(old, float) and isinstance(new, float) and abs(new - old) <= 1e-10 * abs(old) and allows(old, new):
        return old
    return stored(new)
