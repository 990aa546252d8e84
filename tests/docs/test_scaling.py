"""The numbers of docs/scaling.md are those that its formulas give, and those of the code."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

from kvtool.replay import cluster, memory, pool
from kvtool.trace import remote

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "scaling.md").read_text()


def plan() -> ModuleType:
    spec = importlib.util.spec_from_file_location("plan_on_paper", DOCS / "plan_on_paper.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_line_of_the_plan_stands_on_the_page() -> None:
    lines = [line for line in plan().tables() if line]
    assert len(lines) >= 20
    assert [line for line in lines if line not in PAGE.splitlines()] == []


def test_the_plan_counts_as_it_says() -> None:
    found, layer = plan().capture(), plan().replay()
    assert found["cache_bytes"] == 80 * 2 * 8 * 131_584 * 128 * 2
    assert found["all_query_bytes"] == 4 * found["cache_bytes"]  # 64 heads of queries, 16 of keys and values
    assert layer["dense_flops"] == 64 * 512 * 2 * (2 * 131_584 * 128)  # a product with K and one with V per query
    assert layer["array_bytes"] == 4 * (8 * 131_584 * 256 + 64 * 131_584 * 128)


def test_the_page_states_the_limits_of_the_code() -> None:
    assert f"up to\n  {pool.TRIES} times in all" in PAGE
    assert f"{memory.DECISION_BYTES} per cell, KV head and row" in PAGE
    assert f"{memory.ERROR_BYTES} per cell, query head and evaluated step" in PAGE
    assert f"{memory.SCRATCH_BYTES / 1e9:.2f} GB + {memory.SCRATCH_PER_TOKEN >> 10} KiB per row" in PAGE
    assert f"| {memory.PROCESS_BYTES / 1e9:.2f} GB |" in PAGE
    assert f"after {cluster.TIMEOUT_S} seconds" in PAGE
    assert f"newest {remote.KEPT_BYTES >> 30} GiB of chunks" in PAGE
