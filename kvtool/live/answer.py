"""Answer: the span of rows whose likelihood is measured for itself, in the sequence or behind it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from kvtool.errors import KvtoolError
from kvtool.trace import Sequence


@dataclass(frozen=True)
class Answer:
    """Rows low..high-1 of the run, each predicted by the step before it.

    Attributes:
        appended: tokens that are fed behind the sequence, since it does not hold the answer.
        places: how often the sequence holds the text after the event; the first is taken.
    """

    low: int
    high: int
    appended: tuple[int, ...] = ()
    places: int = 1


def find_answer(text: str, sequence: Sequence, event: int, encode: Callable[[str], list[int]]) -> Answer:
    """The rows that `text` names.

    `LO:HI` names rows. Anything else is looked for in the text after the event; the tokens that it
    touches are the answer. If it is not there, its own tokens are fed behind the sequence's last row.

    Args:
        encode: tokens of a text, without anything around them.

    Raises:
        KvtoolError: code `usage` for rows that are not evaluated, or an empty text.
    """
    named = re.fullmatch(r"(\d+):(\d+)", text)
    if named:
        low, high = int(named[1]), int(named[2])
        if not event < low < high <= sequence.length:
            can = f"can answer in rows {event + 1}:{sequence.length}"
            if event + 1 >= sequence.length:
                can = f"has no row that is predicted at or after the event at step {event}"
            raise KvtoolError(
                "usage",
                f"--answer {text}: sequence {sequence.index} {can}",
                "a row is predicted by the step before it, which must come at or after the event; a text that looks "
                "like LO:HI is found with a space in front of it",
            )
        return Answer(low, high)
    if not text.strip():
        raise KvtoolError("usage", "--answer is empty", "give a text, or rows as LO:HI")
    found = _rows_of(text.encode(), sequence, event + 1)
    if found is not None:
        low, high, places = found
        return Answer(low, high, places=places)
    tokens = tuple(encode(text))
    return Answer(sequence.length, sequence.length + len(tokens), tokens)


def _rows_of(text: bytes, sequence: Sequence, first: int) -> tuple[int, int, int] | None:
    """Half-open range of the rows >= `first` that the first occurrence of `text` there touches, and how many
    occurrences there are; or None."""
    if not sequence.has_array("text"):
        return None
    # Bytes, since one character may be spread over several tokens.
    raw = sequence.array("text").numpy().tobytes()
    ends: list[int] = sequence.array("text_offsets").tolist()  # row r is raw[ends[r] : ends[r + 1]]
    place = raw.find(text, ends[first]) if first < sequence.length else -1
    if place < 0:
        return None
    touched = [r for r in range(first, sequence.length) if ends[r] < place + len(text) and ends[r + 1] > place]
    return touched[0], touched[-1] + 1, raw.count(text, ends[first])
