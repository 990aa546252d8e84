"""Ids and sizes as people write and read them."""

from __future__ import annotations

import pytest

from kvtool.errors import KvtoolError
from kvtool.words import parse_ids, printable, size, spans


def test_ids_and_back() -> None:
    assert parse_ids("0,4-7, 5,2", "--layers") == [0, 2, 4, 5, 6, 7]
    assert spans([0, 2, 4, 5, 6, 7]) == "0,2,4-7"
    assert spans([]) == "none"
    assert parse_ids(None, "--layers") is None


@pytest.mark.parametrize("text", ["", "a", "3-1", "1,,2", "-1", "1-", "²", "0-999999999"])
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(KvtoolError, match="--layers"):
        parse_ids(text, "--layers")


def test_sizes_read_well() -> None:
    assert [size(n) for n in (0, 999, 1000, 19_240_000, 999_600_000, 2_100_000_000_000)] == [
        "0 B",
        "999 B",
        "1 kB",
        "19.2 MB",
        "1000 MB",
        "2.1 TB",
    ]


def test_text_is_printed_so_that_no_terminal_obeys_it() -> None:
    assert printable(" the\n\tline\x1b[31m\u202e\u00a0é漢\\n") == " the\\n\\tline\\x1b[31m\\u202e\\xa0é漢\\\\n"
