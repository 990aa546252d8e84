"""Every policy on both sample traces decides what it decided before."""

from __future__ import annotations

import importlib.util
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kvtool.policies import ALL

_spec = importlib.util.spec_from_file_location("goldens_record", Path(__file__).with_name("record.py"))
assert _spec is not None
assert _spec.loader is not None
record = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(record)

TIE = 1e-12  # a cut this close may fall either way on another machine's rounding
RELATIVE = 1e-8


@cache
def observed(name: str) -> dict[str, Any]:
    return record.observe(name)


@pytest.fixture(params=["tiny-gqa", "smollm2", "smollm2-gradients"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def golden(name: str) -> dict[str, Any]:
    return json.loads(record.path_of(name).read_text())


def test_the_trace_is_the_recorded_one(name: str) -> None:
    digests = dict(line.split() for line in (record.ROOT / "sample_traces" / "DIGESTS").read_text().splitlines())
    assert golden(name)["trace"] == observed(name)["trace"] == digests[name]


def test_every_policy_is_covered(name: str) -> None:
    assert {key.split()[0] for key in golden(name)["cells"]} == set(ALL)


def test_decisions(name: str) -> None:
    expected, found = golden(name)["decisions"], observed(name)["decisions"]
    assert set(found) == set(expected)
    moved = [
        key
        for key, was in expected.items()
        if found[key]["digest"] != was["digest"] and not (was["margin"] is not None and was["margin"] <= TIE)
    ]
    assert moved == []
    assert [key for key, was in expected.items() if found[key]["kept"] != was["kept"]] == []


def test_errors(name: str) -> None:
    expected, found = golden(name)["cells"], observed(name)["cells"]
    assert set(found) == set(expected)
    for key, metrics in expected.items():
        assert found[key] == pytest.approx(metrics, rel=RELATIVE, abs=1e-15), key
