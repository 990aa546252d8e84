"""docs/metrics.md lists every column of a decomposition, and the pages name every option."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvtool.replay import replay
from kvtool.report.terminal_decomposition import decomposition_tables
from kvtool.result_columns import KEY, PLACE

DOCS = Path(__file__).resolve().parents[2] / "docs"


def listed(title: str) -> list[str]:
    """The columns in the first field of the table of that section."""
    (section,) = (s for s in re.split(r"^## ", (DOCS / "metrics.md").read_text(), flags=re.M) if s.startswith(title))
    firsts = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return [name for first in firsts for name in re.findall(r"`([^`]+)`", first)]


@pytest.mark.usefixtures("few_draws")
def test_the_page_lists_the_columns_of_both_tables_and_no_other(traced: Any) -> None:
    found = replay(
        traced(), ["jacap"], ratios=["0.5"], layers=[0], sinks=1, window=2, decompose=True, samples=2, pool=6, keep=3
    )
    for title, table in (("Decomposition", "decomposition"), ("Ladder", "ladder")):
        own = [name for name in found.tables[table].column_names if name not in {*KEY, *PLACE[table]}]
        if table == "ladder":
            assert {f"ladder_total{end}" for end in ("_low", "_high")} <= set(own)
            own = [name for name in own if not name.endswith(("_low", "_high"))]
        assert sorted(listed(title)) == sorted(own)


def test_every_option_is_explained() -> None:
    text = (DOCS / "decomposition.md").read_text()
    for option in ("--decompose", "--center", "--horizon", "--samples", "--pool", "--keep"):
        assert f"`{option}`" in text


def numbers(text: str) -> list[float]:
    return [float(word) for word in re.findall(r"(?<![\w.])[+-]?\d+\.\d+", text)]


def test_the_worked_example_shows_what_the_command_prints() -> None:
    """The words line by line; numbers to two units of their last digit, which another machine may round otherwise."""
    (shown,) = re.findall(r"^```text\n(decomposition, .*?)\n```", (DOCS / "decomposition.md").read_text(), re.M | re.S)
    found = replay(
        DOCS.parent / "sample_traces" / "smollm2-gradients.zarr",
        ["snapkv:window=16", "knorm", "jacap:tau=1"],
        ratios=["0.75"], window=8, layers=[0, 9, 29], decompose=True, samples=4, pool=10, keep=5,
    )  # fmt: skip
    console = Console(width=100, highlight=False, record=True, file=io.StringIO())
    for part in decomposition_tables(found, 100):
        console.print(part)
    printed = [line.rstrip() for line in console.export_text().splitlines()]
    assert len(printed) == len(shown.splitlines())
    for mine, theirs in zip(shown.splitlines(), printed, strict=True):
        assert re.sub(r"-?\d[\d.]*", "#", mine) == re.sub(r"-?\d[\d.]*", "#", theirs)
        assert numbers(mine) == pytest.approx(numbers(theirs), rel=0.02, abs=0.003)
