"""Parameter checks that the policies share; a ValueError becomes `policy-parameter` on the command line."""

from __future__ import annotations

import dataclasses
import math
import typing
from fractions import Fraction
from typing import Any

Reducer = typing.Literal["mean", "max", "sum"]


def check_choices(policy: Any) -> None:
    """Every field annotated with a Literal (alone, or in a union with numbers) holds one of its words.

    Raises:
        ValueError: naming the field and the choices.
    """
    hints = typing.get_type_hints(type(policy))
    for field in dataclasses.fields(policy):
        hint, value = hints[field.name], getattr(policy, field.name)
        members = (hint,) if typing.get_origin(hint) is typing.Literal else typing.get_args(hint)
        words = [w for m in members if typing.get_origin(m) is typing.Literal for w in typing.get_args(m)]
        if words and isinstance(value, str) and value not in words:
            raise ValueError(f"{field.name}={value} should be one of {', '.join(str(w) for w in words)}")


def check_at_least(policy: Any, minimum: float, *names: str) -> None:
    """Every named field is a finite number >= `minimum`; raises ValueError."""
    for name in names:
        value = getattr(policy, name)
        if not math.isfinite(value) or value < minimum:
            raise ValueError(f"{name}={value} should be at least {minimum:g}")


def check_positive(policy: Any, *names: str) -> None:
    """Every named field is a finite number > 0; raises ValueError."""
    for name in names:
        value = getattr(policy, name)
        if not math.isfinite(value) or value <= 0:
            raise ValueError(f"{name}={value} should be above 0")


def check_share(policy: Any, *names: str) -> None:
    """Every named field lies in 0..1; raises ValueError."""
    for name in names:
        value = getattr(policy, name)
        if not 0 <= value <= 1:
            raise ValueError(f"{name}={value} should lie in 0..1")


def share_of(budget: int, share: float) -> int:
    """`share` of `budget` tokens, rounded down, exact in the decimal that was typed (as ratios are)."""
    exact = Fraction(str(share))
    return exact.numerator * budget // exact.denominator
