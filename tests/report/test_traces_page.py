"""What a reader of two traces held together sees."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from kvtool.compare.traces_diff import TracesDiff
from kvtool.report.terminal_traces import traces_tables

ARGV = {"name": "capture.argv", "a": ["kvtool", "capture", "x" * 70], "b": ["kvtool", "capture", "y" * 70]}
VERSION = {"name": "capture.versions.torch", "a": "2.3.0", "b": "2.4.1"}
CHUNK = {"name": "capture.chunk", "a": None, "b": 512}


def line(layer: int, array: str, largest: float | None, heads_off: int = 0) -> dict[str, Any]:
    found = {"layer": layer, "array": array, "bound": 4e-5, "rows": 24, "largest": largest, "heads": 2}
    return found | {"heads_off": heads_off, "tokens_off": 3 * heads_off, "unequal": int(largest != 0.0)}


def printed(width: int, **fields: Any) -> str:
    side = {"model": "toy", "run_dtype": "float32", "stored_dtype": "bfloat16", "digest": "ab" * 32}
    sides = [side | {"path": f"traces/of/{name}.zarr"} for name in "ab"]
    layers = [line(layer, array, 0.0) for layer in (2, 3) for array in ("keys", "values", "queries", "output_sample")]
    given = {"identical": False, "bound": 1e-5, "fixed": False, "layers": layers} | fields
    console = Console(width=width, record=True, file=io.StringIO(), highlight=False)
    for part in traces_tables(TracesDiff(*sides, **given), width):
        console.print(part)
    return console.export_text()


@pytest.mark.parametrize("width", [80, 100, 140])
def test_what_decides_nothing_is_one_line_and_cropped_nowhere(width: int) -> None:
    text = printed(width, settings=[CHUNK, ARGV, VERSION])
    assert "│ capture.chunk │ - │ 512 │" in text
    assert "Differ too, but decide nothing: capture.argv, capture.versions.torch 2.3.0 → 2.4.1." in " ".join(
        text.split()
    )
    assert "xxx" not in text
    assert max(map(len, text.splitlines())) <= width


def test_without_a_deciding_setting_there_is_no_table_of_settings() -> None:
    text = printed(140, settings=[ARGV])
    assert "settings that differ" not in text
    assert "Settings that decide results: all the same." in text
    assert "Differs too, but decides nothing: capture.argv." in text


def test_equal_traces_say_nothing_of_settings() -> None:
    text = printed(140, identical=True, layers=[])
    assert "the two traces are the same to the byte" in text
    assert "ettings" not in text


def test_layers_that_part_are_marked_at_the_array() -> None:
    layers = [
        line(2, "keys", 1e-7),
        line(2, "values", 0.0),
        line(3, "keys", 0.25, heads_off=1),
        line(3, "values", None),
    ]
    first = {"sequence": 0, "layer": 3, "token": 12, "position": 19, "text": "w12", "kv_head": 1, "q_head": None}
    text = printed(80, layers=layers, first=first | {"array": "keys", "deviation": 0.25, "bound": 4e-5})
    rows = [[cell.strip() for cell in row.strip("│").split("│")] for row in text.splitlines()]
    assert ["2", "4.0e-05", "1.0e-07", "0", "-", "-"] in rows
    assert ["3", "4.0e-05", "2.5e-01 !", "not finite", "1 of 4", "3"] in rows
    assert "! is beyond the bound of its layer." in text
    assert "!" not in printed(80)


def test_names_cannot_command_the_terminal() -> None:
    text = printed(140, settings=[{"name": "model.name", "a": "\x1b[2J", "b": "toy"}])
    assert "\x1b" not in text
    assert r"\x1b[2J" in text
