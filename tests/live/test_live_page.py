"""docs/live.md names every column of every table that a live run fills."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvtool.live import live
from kvtool.result import LIVE, SCHEMAS

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize("calibrate", [False, True])
def test_every_column_is_documented(folder, traced, calibrate):
    found = live(folder("llama"), traced("llama"), ["knorm"], ratios=["0.5"], calibrate=calibrate, layer_errors=True)
    pages = "".join((DOCS / name).read_text() for name in ("live.md", "results.md", "metrics.md"))
    words = set(re.findall(r"`([^`\n]+)`", pages))
    for table in SCHEMAS[LIVE]:
        names = found.tables[table].column_names
        assert names
        assert [name for name in names if name not in words] == [], table
