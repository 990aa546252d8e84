"""The documentation names everything that exists: columns, error codes, policies, commands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvtool.errors import CODES
from kvtool.replay import replay
from kvtool.result import TABLES

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def words_of(*pages: str) -> set[str]:
    """Everything in backticks on these pages."""
    return {word for page in pages for word in re.findall(r"`([^`\n]+)`", (DOCS / page).read_text())}


def test_every_column_of_every_table_is_documented() -> None:
    result = replay(ROOT / "sample_traces" / "tiny-gqa.zarr", ["knorm"], ratios=["0.5"], layers=[0])
    words = words_of("results.md", "metrics.md")
    for table in TABLES:
        missing = [name for name in result.tables[table].column_names if name not in words]
        assert not missing, f"{table}: {missing}"


def test_every_column_of_repeating_schedules_is_documented() -> None:
    trace = ROOT / "sample_traces" / "tiny-gqa.zarr"
    found = replay(trace, ["knorm"], budgets=[40], layers=[0], schedules=["every:8"], telemetry=True)
    words = words_of("results.md", "metrics.md")
    for table in ("timeline", "events", "cache", "telemetry", *TABLES):
        missing = [name for name in found.tables[table].column_names if name not in words]
        assert not missing, f"{table}: {missing}"


def test_the_steps_of_the_serving_loop_are_where_the_page_says() -> None:
    text = (DOCS / "decode.md").read_text()
    rows = re.findall(r"^\| [^|]+ \| `(kvtool/[a-z_/]+\.py)` \| ([^|]+) \|$", text, re.MULTILINE)
    assert len(rows) >= 10
    for file, names in rows:
        source = (ROOT / file).read_text()
        for name in re.findall(r"`(\w+)`", names):
            assert re.search(rf"^\s*(?:def|class) {name}\b", source, re.MULTILINE), f"{file}: {name}"


def test_every_schedule_option_is_on_its_page() -> None:
    text = (DOCS / "decode.md").read_text()
    options = re.findall(r'"(--[a-z-]+)"', (ROOT / "kvtool" / "cli" / "schedules.py").read_text())
    known = {"--evict-at", "--every", "--high-water", "--prefill-block", "--evict-order", "--delay", "--granularity"}
    assert len({*options, *known}) >= 10
    assert [option for option in {*options, *known} if f"`{option}" not in text] == []


def test_every_error_code_is_documented_and_no_other() -> None:
    documented = set(re.findall(r"^\| `([a-z-]+)` \|", (DOCS / "errors.md").read_text(), re.MULTILINE))
    assert documented == set(CODES)


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda p: p.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", page.read_text())
    assert [t for t in targets if not (page.parent / t).exists()] == []


def test_every_command_has_a_page() -> None:
    from kvtool.cli.main import app

    text = "\n".join(page.read_text() for page in [*DOCS.glob("*.md"), ROOT / "README.md"])
    commands = [command.name for command in app.registered_commands]
    assert len(commands) >= 5
    assert [name for name in commands if f"kvtool {name}" not in text] == []
