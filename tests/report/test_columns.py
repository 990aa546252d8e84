"""Which columns a narrow terminal keeps."""

from __future__ import annotations

import pytest

from kvtool.cli.console import terminal_width
from kvtool.report.columns import fitting, left_out

ROWS = [{"policy": "snapkv", "a": "1.000", "long title": "2", "c": "12345678"}]


@pytest.mark.parametrize(
    ("width", "kept"),
    [
        (None, ["a", "long title", "c"]),
        (42, ["a", "long title", "c"]),  # (6 + 3) + (5 + 3) + (10 + 3) + (8 + 3) + 1
        (41, ["a", "c"]),
        (28, ["a"]),
        (1, ["a"]),  # what gives no way stays
    ],
)
def test_columns_give_way_in_their_order(width, kept):
    found = fitting(["a", "long title", "c"], ROWS, width, always=["policy"], gives_way=["long title", "c"])
    assert found == kept


def test_what_is_left_out_is_named():
    assert left_out(["a", "b", "c"], ["b"]) == "Left out, since the terminal is narrow: a, c."
    assert left_out(["a"], ["a"]) is None


@pytest.mark.parametrize(("columns", "width"), [("100", 100), ("", None), ("x", None), ("5", None)])
def test_a_pipe_is_as_wide_as_columns_says(monkeypatch, columns, width):
    monkeypatch.setenv("COLUMNS", columns)
    assert terminal_width() == width
