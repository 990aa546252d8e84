"""Values that are undefined drop out of a mean: their number is recorded, and more of them than before fail."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvtool.check import Check, check
from kvtool.metrics.output_error import LayerError, OutputError

from .conftest import JOB, Suite

CELL = "knorm @0.5 prompt-end sequence 0"
JOBS = JOB.replace('"mean_output_error"]', '"mean_output_error", "evicted_mass", "output_error_max"]')


def lost(monkeypatch: pytest.MonkeyPatch, metric: type, column: str, layers: tuple[int, ...], value: float) -> None:
    """From here on `column` is `value` in these layers, in the first head where it has heads."""
    partials = vars(metric).get("_whole", metric.partials)  # type: ignore[attr-defined]
    monkeypatch.setattr(metric, "_whole", partials, raising=False)

    def measure(self: Any, errors: Any, geometry: Any, retained: Any) -> list[dict[str, Tensor]]:
        cells = [dict(cell) for cell in partials(self, errors, geometry, retained)]
        for found in cells if geometry.layer in layers else []:
            found[column] = found[column].to(torch.float64).clone()
            (found[column] if found[column].ndim == 0 else found[column][:1]).fill_(value)
        return cells

    monkeypatch.setattr(metric, "partials", measure)


def values(found: Check) -> dict[str, tuple[str, Any, Any]]:
    (row,) = (row for row in found.jobs[0].rows if row.name == CELL)
    return {value.metric: (value.outcome, value.old, value.new) for value in row.values}


def cell(path: Path) -> dict[str, Any]:
    return json.loads((path.parent / "check.json").read_text())["jobs"]["first"]["cells"][CELL]


@pytest.mark.parametrize(
    ("metric", "column", "count", "value"),
    [
        (OutputError, "output_error", "undefined_heads", math.nan),
        (LayerError, "layer_error", "undefined_layers", math.nan),
        (OutputError, "output_error_max", "output_error_max:undefined", math.nan),
        (OutputError, "output_error_max", "output_error_max:undefined", math.inf),
        (OutputError, "output_error_max", "output_error_max:undefined", -math.inf),
    ],
)
def test_more_undefined_values_fail_and_fewer_are_better(
    suite: Suite, monkeypatch: pytest.MonkeyPatch, metric: type, column: str, count: str, value: float
) -> None:
    loose = "[tolerances]\ndefault = {relative = 1e6, absolute = 1e6}\n"
    path = suite(loose, jobs=JOBS)
    check(path, update=True)
    assert count not in cell(path)
    lost(monkeypatch, metric, column, (3,), value)
    found = check(path)
    assert values(found)[count] == ("worse", 0, 1)
    assert not found.ok
    assert f"{count} worse: 0 to 1" in found.document()["jobs"][0]["cells"][1]["message"]
    check(path, update=True)
    assert cell(path)[count] == 1
    assert values(check(path, strict=True))[count] == ("same", 1, 1)
    lost(monkeypatch, metric, column, (0, 3), value)
    assert values(check(path))[count] == ("worse", 1, 2)
    lost(monkeypatch, metric, column, (), value)
    found = check(path)
    assert values(found)[count] == ("better", 1, 0)
    assert found.ok


def test_the_mean_reads_better_and_still_fails(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worst head is undefined, so that the mean over the others is smaller."""
    path = suite(jobs=JOBS)
    check(path, update=True)
    combine = OutputError.combine

    def without_the_worst(self: Any, partials: Any) -> dict[str, Any]:
        heads = torch.cat([one["output_error"] for one in partials])
        heads[heads.argmax()] = torch.nan
        return combine(self, [{**partials[0], "output_error": heads}])

    monkeypatch.setattr(OutputError, "combine", without_the_worst)
    found = check(path)
    assert values(found)["mean_output_error"][0] == "better"
    assert values(found)["undefined_heads"] == ("worse", 0, 1)
    assert not found.ok


def test_a_count_that_is_asked_for_is_recorded_always_and_may_have_a_tolerance(
    suite: Suite, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = JOB.replace('"mean_output_error"]', '"undefined_heads"]')
    path = suite(jobs=jobs)
    check(path, update=True)
    assert cell(path)["undefined_heads"] == 0
    lost(monkeypatch, OutputError, "output_error", (3,), math.nan)
    assert values(check(path))["undefined_heads"] == ("worse", 0, 1)
    suite("[tolerances]\nundefined_heads = {absolute = 1}\nundefined_layers = {absolute = 1}\n", jobs=jobs)
    assert values(check(path))["undefined_heads"] == ("within", 0, 1)
