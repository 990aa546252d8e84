"""QuerySource: where the expected queries come from, as one word with a number behind a colon."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

DEFAULTS: dict[str, float | None] = {
    "rope_mean": None,
    "prompt": None,
    "window": 256,
    "ema": 0.99,
    "mixture": 4,
    "future": None,
}
NUMBERS = {"window": ":n", "ema": ":beta", "mixture": ":K"}
CHOICES = tuple(f"{kind}[{NUMBERS[kind]}]" if kind in NUMBERS else kind for kind in DEFAULTS)
Statistics = Annotated[str, " | ".join(CHOICES)]  # what a parameter of this type may say, for `kvtool policies`


@dataclass(frozen=True)
class QuerySource:
    """`window:256` and its like, parsed.

    Attributes:
        kind: a key of DEFAULTS.
        number: queries in the window, decay of the average, components of the mixture; None for the others.
    """

    kind: str
    number: float | None = None

    def __str__(self) -> str:
        if self.number == DEFAULTS[self.kind]:
            return self.kind
        return f"{self.kind}:{self.number:g}" if self.kind == "ema" else f"{self.kind}:{self.count}"

    @property
    def count(self) -> int:
        """The number as a count: queries in the window, components of the mixture."""
        return int(self.number or 0)

    @property
    def needs(self) -> tuple[str, ...]:
        """What a trace must hold, see `Policy.needs`."""
        if self.kind == "future":
            return ()
        if self.kind == "window":
            return ("recent-queries",)
        turned = self.kind in ("rope_mean", "mixture")
        return ("prompt-queries", "rotation", "future-rotation") if turned else ("prompt-queries",)


def parse_source(text: str) -> QuerySource:
    """Raises ValueError that lists the choices."""
    kind, colon, number = text.partition(":")
    if kind not in DEFAULTS or (colon and kind not in NUMBERS):
        raise ValueError(f"statistics={text} should be one of {', '.join(CHOICES)}")
    if not colon:
        return QuerySource(kind, DEFAULTS[kind])
    try:
        value = float(number) if kind == "ema" else float(int(number))
    except ValueError:
        value = math.nan
    if kind == "ema" and not 0 < value < 1:
        raise ValueError(f"statistics={text} should have a decay between 0 and 1, such as ema:0.99")
    if kind != "ema" and not value >= 1:
        raise ValueError(f"statistics={text} should have a whole number above 0, such as {kind}:{DEFAULTS[kind]}")
    return QuerySource(kind, value)
