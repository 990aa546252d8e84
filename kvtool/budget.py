"""Budget: how many tokens a KV head keeps, typed as a count or as the share that is evicted."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from fractions import Fraction

from kvtool.errors import KvtoolError

MOST_TOKENS = 2**31 - 1
MOST_PLACES = 12  # decimals of a ratio: more cannot matter, and equal printed ratios must be equal ratios


def _exact(text: str) -> Fraction:
    """The decimal that was typed; huge exponents are refused before they are expanded."""
    try:
        decimal = Decimal(text)
    except InvalidOperation:
        decimal = Decimal("nan")
    if not decimal.is_finite():
        raise KvtoolError("usage", f"ratio {text!r} is not a number", "a ratio looks like 0.75")
    # Not normalize(): it rounds a tiny number to zero, whose exponent then looks harmless.
    digits, exponent = "".join(map(str, decimal.as_tuple().digits)), int(decimal.as_tuple().exponent)
    zeros = len(digits) - len(digits.rstrip("0"))
    if decimal.adjusted() > MOST_PLACES or exponent + zeros < -MOST_PLACES:
        raise KvtoolError("usage", f"ratio {text} has more than {MOST_PLACES} places", "a ratio looks like 0.75")
    return Fraction(decimal)


@dataclass(frozen=True)
class Budget:
    """Either a compression ratio c (share evicted, 0 <= c < 1) or a token count, never both.

    The ratio is kept as the exact decimal that was typed: 0.8 of 100 keeps 20, which no
    binary floating-point product gives reliably.
    """

    ratio: Fraction | None = None
    tokens: int | None = None

    @classmethod
    def from_ratio(cls, ratio: str | float | Fraction) -> Budget:
        """Raises KvtoolError (`usage`) unless 0 <= ratio < 1."""
        exact = ratio if isinstance(ratio, Fraction) else _exact(str(ratio).strip())
        if not 0 <= exact < 1:
            raise KvtoolError(
                "usage",
                f"ratio {ratio} is outside 0 <= ratio < 1",
                "a ratio is the share of tokens evicted: 0.75 keeps a quarter",
            )
        return cls(ratio=exact)

    @classmethod
    def from_tokens(cls, tokens: int) -> Budget:
        """Raises KvtoolError (`usage`) below 1."""
        if tokens < 1:
            raise KvtoolError("usage", f"budget {tokens} keeps no token", "a budget is at least 1 token per KV head")
        if tokens > MOST_TOKENS:
            raise KvtoolError("usage", f"budget {tokens} is above {MOST_TOKENS}", "a budget is tokens per KV head")
        return cls(tokens=int(tokens))

    def resolve(self, candidates: int) -> int:
        """Tokens to keep of `candidates`: N - floor(c·N), or min(N, tokens)."""
        if self.ratio is not None:
            return candidates - (self.ratio.numerator * candidates) // self.ratio.denominator
        assert self.tokens is not None
        return min(candidates, self.tokens)

    @property
    def ratio_number(self) -> float | None:
        """The ratio as a JSON number, None where a count was asked for."""
        return None if self.ratio is None else float(self.ratio)

    def __str__(self) -> str:
        return f"{float(self.ratio):g}" if self.ratio is not None else f"{self.tokens} tokens"
