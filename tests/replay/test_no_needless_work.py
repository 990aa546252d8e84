"""What a replay does not need it does not load, read or compute."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from kvtool import plugins
from kvtool.result import table_of

ROOT = Path(__file__).resolve().parents[2]
SLOW = ("zarr", "scipy", "pandas", "transformers", "torch._dynamo", "triton")


def test_replay_imports_nothing_slow_that_it_does_not_use() -> None:
    code = (
        "import sys; from kvtool.replay import replay\n"
        "found = replay('sample_traces/tiny-gqa.zarr', 'knorm', ratios='0.5')\n"
        f"print(len(found.entries('cells')), [name for name in {SLOW} if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    count, loaded = run.stdout.strip().split(" ", 1)
    assert int(count) > 0
    assert loaded == "[]"


def package(folder: Path, name: str, entry_points: str) -> None:
    (folder / f"{name}-1.0.dist-info").mkdir(parents=True)
    (folder / f"{name}-1.0.dist-info/METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (folder / f"{name}-1.0.dist-info/entry_points.txt").write_text(entry_points)


def test_packages_are_asked_who_they_are_only_where_one_plugs_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    inner = plugins._said

    def said(distribution: Any, field: str) -> str:
        asked.append(field)
        return inner(distribution, field)

    monkeypatch.setattr(plugins, "_said", said)
    package(tmp_path / "a", "plain", "[console_scripts]\nplain = plain:main\n")
    assert plugins._installed((str(tmp_path / "a"),)) == ({}, ())
    assert asked == []
    package(tmp_path / "b", "plain", "[console_scripts]\nplain = plain:main\n")
    package(tmp_path / "b", "giver", "[kvtool.policies]\nmine = giver:Mine\n")
    found, faults = plugins._installed((str(tmp_path / "b"),))
    assert [plugin.name for plugin in found["kvtool.policies"]] == ["mine"]
    assert faults == ()
    assert sorted(asked) == ["Name", "Name", "Version"]


@pytest.mark.parametrize(
    ("values", "expected", "kind"),
    [
        ([1.5, math.nan, None, -math.inf], [1.5, None, None, None], pa.float64()),
        ([1, 2.5, None], [1.0, 2.5, None], pa.float64()),
        ([1, None], [1.0, None], pa.float64()),
        ([np.float64("nan"), np.float64(2)], [None, 2.0], pa.float64()),
        ([None, None], [None, None], pa.float64()),
        ([True, None], [True, None], pa.bool_()),
        (["a", None], ["a", None], pa.string()),
        ([[1.0, math.nan], []], [[1.0, None], []], pa.list_(pa.float64())),
        ([["a"], None], [["a"], None], pa.list_(pa.string())),
    ],
)
def test_columns_of_any_kind_hold_no_nan(values: list[Any], expected: list[Any], kind: pa.DataType) -> None:
    entries = [{"policy": "p", "found": value} for value in values]
    column = table_of("layers", entries)["found"]
    assert column.to_pylist() == expected
    assert column.type == kind


def test_an_entry_that_lacks_a_column_is_null_there() -> None:
    table = table_of("layers", [{"policy": "p", "one": 1.0}, {"policy": "q", "two": "b"}])
    assert table["one"].to_pylist() == [1.0, None]
    assert table["two"].to_pylist() == [None, "b"]
    assert table["policy"].to_pylist() == ["p", "q"]
