"""Lists of numbers as people type them."""

from __future__ import annotations

from typing import Any

from kvtool.errors import KvtoolError


def number_list(words: list[str] | None, whole: bool = False) -> list[Any]:
    """`["0.5,0.9", "0.75"]` -> the words themselves (ratios stay exact decimals) or whole numbers."""
    parts = [part.strip() for word in words or [] for part in word.split(",") if part.strip()]
    if words and not parts:
        raise KvtoolError("usage", f"{' '.join(words)!r} holds no number")
    if not whole:
        return parts
    try:
        return [int(part) for part in parts]
    except ValueError:
        raise KvtoolError("usage", f"{', '.join(parts)}: a budget is a whole number of tokens") from None


def id_list(text: str | None, option: str) -> list[int] | None:
    """`0,4-7` -> [0, 4, 5, 6, 7]; None for None.

    Raises:
        KvtoolError: code `usage`.
    """
    if text is None:
        return None
    ids: list[int] = []
    for part in text.split(","):
        low, dash, high = part.strip().partition("-")
        if not low.isdecimal() or (dash and not high.isdecimal()) or (dash and int(high) < int(low)):
            raise KvtoolError("usage", f"{option} {text!r} is not a list of ids", "write it like 0,4-7")
        if dash and int(high) - int(low) > 100_000:
            raise KvtoolError("usage", f"{option} {text!r} names too many ids")
        ids.extend(range(int(low), int(high or low) + 1))
    return list(dict.fromkeys(ids))
