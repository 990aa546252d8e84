"""Which rows an answer is: bytes of the text, not characters, since one may be spread over several tokens."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvtool.errors import KvtoolError
from kvtool.live.answer import Answer, find_answer

PIECES = [b"The ", b"code", b" is", b" d\xc3", b"\xa9j", b"\xc3\xa0", b" vu", b" code", b" is", b" 42"]


def sequence(pieces=PIECES, stored=True):
    arrays = {
        "text": torch.from_numpy(np.frombuffer(b"".join(pieces), dtype=np.uint8).copy()),
        "text_offsets": torch.tensor([0, *np.cumsum([len(p) for p in pieces]).tolist()]),
    }
    return SimpleNamespace(index=0, length=len(pieces), has_array=lambda name: stored, array=arrays.__getitem__)


def never(text):
    raise AssertionError("the text is there")


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("déjà", (3, 6)),
        ("é", (3, 5)),
        ("à vu", (5, 7)),
        ("code", (7, 8)),  # the first one lies before the event
        ("s 42", (8, 10)),
        ("7:9", (7, 9)),
        ("3:10", (3, 10)),
    ],
)
def test_rows_that_a_text_touches(text, rows):
    assert find_answer(text, sequence(), 2, never) == Answer(*rows)


def test_places_are_counted_after_the_event_and_the_first_is_taken():
    assert find_answer(" is", sequence(), 0, never) == Answer(2, 3, places=2)
    assert find_answer(" is", sequence(), 2, never) == Answer(8, 9)


def test_a_text_that_is_not_there_goes_behind_the_last_row():
    assert find_answer("The", sequence(), 2, lambda text: [7, 8]) == Answer(10, 12, (7, 8))
    assert find_answer("42", sequence(stored=False), 2, lambda text: [5]) == Answer(10, 11, (5,))


@pytest.mark.parametrize("text", ["2:5", "0:3", "5:5", "9:11", "5:4", "", "  "])
def test_rows_that_are_not_predicted_after_the_event_are_refused(text):
    with pytest.raises(KvtoolError, match="--answer"):
        find_answer(text, sequence(), 2, never)
