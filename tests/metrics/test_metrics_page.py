"""docs/metrics.md and the code name the same columns, with the same unit and direction."""

from __future__ import annotations

import re
from pathlib import Path

from kvtool.metrics import AGE_COLUMNS, columns

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
SECTIONS = {"head": "Per query head", "layer": "Per layer", "cell": "Per cell", "kv_head": "Ages"}


def rows_of(title: str) -> dict[str, list[str]]:
    """Column name -> the other fields of its table row, in the section of that title."""
    (section,) = (s for s in re.split(r"^## ", PAGE.read_text(), flags=re.M) if s.startswith(title))
    found = {}
    for line in section.splitlines():
        fields = [field.strip() for field in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(fields) >= 4 and fields[0].startswith("`"):
            for name in re.findall(r"`([^`]+)`", fields[0]):
                assert name not in found, name
                found[name] = fields[1:]
    return found


def test_every_column_stands_in_the_section_of_its_level_and_no_other_does() -> None:
    for level, title in SECTIONS.items():
        known = {column.name for column in (*columns(), *AGE_COLUMNS) if column.level == level}
        assert set(rows_of(title)) == known, title


def test_units_and_directions_agree() -> None:
    words = {"lower": "lower", "higher": "higher", "none": "–"}
    for column in columns():
        _, unit, better, _ = rows_of(SECTIONS[column.level])[column.name]
        assert (unit, better) == (column.unit, words[column.direction]), column.name
    for column in AGE_COLUMNS:
        _, unit, _ = rows_of("Ages")[column.name]
        assert column.unit.startswith(unit), column.name


def test_the_page_warns_that_replay_is_open_loop_before_the_first_table() -> None:
    text = PAGE.read_text()
    assert 0 < text.index("open-loop") < text.index("|---|")
