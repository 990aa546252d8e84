"""Lists of numbers as people type them."""

from __future__ import annotations

from typing import Any

from kvtool.errors import KvtoolError


def number_list(words: list[str] | None, whole: bool = False, what: str = "a budget") -> list[Any]:
    """`["0.5,0.9", "0.75"]` -> the words themselves (ratios stay exact decimals) or whole numbers."""
    parts = [part.strip() for word in words or [] for part in word.split(",") if part.strip()]
    if words and not parts:
        raise KvtoolError("usage", f"{' '.join(words)!r} holds no number")
    if not whole:
        return parts
    try:
        return [int(part) for part in parts]
    except ValueError:
        raise KvtoolError("usage", f"{', '.join(parts)}: {what} is a whole number of tokens") from None
