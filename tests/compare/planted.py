"""Small results to set against each other, and changes planted in copies of them."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa

from kvtool.replay import replay
from kvtool.result import Result

SAMPLES = Path(__file__).resolve().parents[2] / "sample_traces"
TINY, GRADIENTS = SAMPLES / "tiny-gqa.zarr", SAMPLES / "smollm2-gradients.zarr"
LABEL = "snapkv:window=8"


@cache
def _tiny(schedules: tuple[str, ...], precision: str, window: int) -> Result:
    sizes: dict[str, Any] = {"budgets": [40]} if schedules else {"ratios": ["0.5", "0.75"]}
    return replay(
        TINY, ["snapkv:window=8", "h2o"], sinks=1, window=window, precision=precision, schedules=schedules, **sizes
    )


def tiny(schedules: tuple[str, ...] = (), precision: str = "float64", window: int = 8) -> Result:
    """A result of its own: two policies and the controls on the tiny trace."""
    found = _tiny(schedules, precision, window)
    return Result(copy.deepcopy(found.manifest), dict(found.tables), list(found.warnings), found.schema)


def with_value(result: Result, table: str, column: str, row: int, value: Any) -> Result:
    """A copy with one value replaced."""
    old = result.tables[table]
    values = old.column(column).to_pylist()
    values[row] = value
    place = old.column_names.index(column)
    tables = {
        **result.tables,
        table: old.set_column(place, column, pa.array(values, type=old.schema.field(place).type)),
    }
    return Result(copy.deepcopy(result.manifest), tables, result.warnings, result.schema)


def where(result: Result, table: str, **conditions: Any) -> list[int]:
    """The rows of a table in which these columns hold these values."""
    columns = {name: result.tables[table].column(name).to_pylist() for name in conditions}
    count = result.tables[table].num_rows
    return [row for row in range(count) if all(columns[name][row] == value for name, value in conditions.items())]


def without_rows(result: Result, table: str, rows: list[int]) -> Result:
    """A copy without these rows of a table."""
    kept = [row for row in range(result.tables[table].num_rows) if row not in set(rows)]
    tables = {**result.tables, table: result.tables[table].take(kept)}
    return Result(copy.deepcopy(result.manifest), tables, result.warnings, result.schema)


def repeated(result: Result, sequences: int, shift: Any) -> Result:
    """A copy whose sequence 0 stands `sequences` times, its head errors moved by shift(sequence, row of rows)."""
    tables = {}
    for name, table in result.tables.items():
        first = table.take(where(result, name, sequence=0))
        place = table.column_names.index("sequence")
        copies = []
        for index in range(sequences):
            mine = first.set_column(place, "sequence", pa.array([index] * first.num_rows, type=pa.int32()))
            if name == "rows":
                at = mine.column_names.index("output_error")
                moved = [v + shift(index, row) for row, v in enumerate(mine.column("output_error").to_pylist())]
                mine = mine.set_column(at, "output_error", pa.array(moved, type=pa.float64()))
            copies.append(mine)
        tables[name] = pa.concat_tables(copies)
    manifest = copy.deepcopy(result.manifest)
    lengths = manifest["sequences"]
    lengths["indices"], lengths["count"] = list(range(sequences)), sequences
    lengths["prompt_lengths"] = lengths["prompt_lengths"][:1] * sequences
    lengths["lengths"] = lengths["lengths"][:1] * sequences
    return Result(manifest, tables, result.warnings, result.schema)
