"""docs/ablate.md names every axis, level and column."""

from __future__ import annotations

import re
from pathlib import Path

from kvtool.ablate.axes import AXES
from kvtool.ablate.run import ablate

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "ablate.md").read_text()
WORDS = set(re.findall(r"`([^`\n]+)`", PAGE))


def test_every_axis_has_its_line() -> None:
    lines = {line.split("`")[1]: line for line in PAGE.splitlines() if line.startswith("| `")}
    for axis in AXES:
        line = lines[axis.name]
        assert re.findall(r"`([^`]+)`", line)[1:] == [level.name for level in axis.levels]
        assert axis.question in line
        assert line.rstrip(" |").endswith("yes") == axis.paired


def test_every_column_is_documented() -> None:
    trace = ROOT / "sample_traces" / "tiny-gqa.zarr"
    result = ablate(trace, axes="temperature,ridge", layers=[0], sinks=1, window=8)
    known = WORDS | set(re.findall(r"`([^`\n]+)`", (ROOT / "docs" / "results.md").read_text()))
    known |= set(re.findall(r"`([^`\n]+)`", (ROOT / "docs" / "metrics.md").read_text()))
    for name in ("cells", "effects", "interactions"):
        columns = result.tables[name].column_names
        assert [column for column in columns if column not in (known if name == "cells" else WORDS)] == []
