"""Ids and sizes as people write and read them."""

from __future__ import annotations

from collections.abc import Iterable

from kvtool.errors import KvtoolError

MOST_IDS = 100_000


def parse_ids(text: str | None, option: str) -> list[int] | None:
    """`0,4-7` as [0, 4, 5, 6, 7], ascending; None (all) stays None.

    Args:
        option: as the user typed it, for the message.

    Raises:
        KvtoolError: code `usage`.
    """
    if text is None:
        return None
    ids: set[int] = set()
    for part in text.split(","):
        low, dash, high = (word.strip() for word in part.partition("-"))
        sound = low.isascii() and low.isdigit() and (not dash or (high.isascii() and high.isdigit()))
        if not sound or int(high or low) < int(low):
            raise KvtoolError("usage", f"{option} {text} is not a list of ids", f"write {option} 0,4-7")
        if int(high or low) - int(low) >= MOST_IDS:
            raise KvtoolError("usage", f"{option} {text} names too many ids")
        ids.update(range(int(low), int(high or low) + 1))
    return sorted(ids)


def spans(ids: Iterable[int]) -> str:
    """[0, 1, 2, 7] as `0-2,7`; `none` for no id."""
    runs: list[list[int]] = []
    for i in ids:
        if runs and runs[-1][-1] == i - 1:
            runs[-1].append(i)
        else:
            runs.append([i])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs) or "none"


def size(count: int) -> str:
    """Bytes in the unit that reads best, powers of 1,000: 1.23 GB."""
    for unit, base in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= base:
            return f"{count / base:.3g} {unit}" if count / base < 999.5 else f"{count / base:.0f} {unit}"
    return f"{count} B"


def asked(ratio: float | None, budget: int | None) -> str:
    """What one cell was asked to evict or keep, as people read it."""
    return f"ratio {ratio:g}" if ratio is not None else f"budget {budget}"


def printable(text: str) -> str:
    """`text` on one line that no terminal obeys: control and format characters, newlines among them, as escapes."""
    return "".join(c if c.isprintable() and c != "\\" else c.encode("unicode_escape").decode() for c in text)
