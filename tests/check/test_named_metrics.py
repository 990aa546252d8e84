"""Metrics that a suite names: all their columns, with the parameters they were recorded with, and never by accident."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from kvtool.check import Check, check
from kvtool.cli.main import run
from kvtool.errors import KvtoolError

from .conftest import JOB, Suite

CELL = "knorm @0.5 prompt-end sequence 0"
METRIC = '''
from dataclasses import dataclass
import torch
from kvtool.metrics import Column, Metric

@dataclass(frozen=True)
class BadSteps(Metric):
    """Steps whose error is above a limit."""

    limit: float = 0.5

    name = "{name}"
    version = 1
    columns = (
        Column("bad_steps", "head", "share", "lower", "of a head"),
        Column("bad_layer", "layer", "share", "lower", "of a layer"),
        Column("mean_bad_steps", "cell", "share", "lower", "of a cell"),
    )

    def partial(self, errors, geometry, retained):
        ratio = (errors.squared_error / errors.squared_output).sqrt()
        heads = (ratio > self.limit).double().mean(-1)
        return {{"bad_steps": heads, "bad_layer": heads.max()}}

    def combine(self, partials):
        return {{"mean_bad_steps": float(torch.cat([p["bad_steps"] for p in partials]).mean())}}
'''
COLUMNS = {"bad_steps", "bad_layer", "mean_bad_steps"}


def installed(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, module: str, source: str) -> None:
    """A package that gives the metric `name`."""
    info = folder / "bad_ways-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bad-ways\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[kvtool.metrics]\n{name} = {module}:BadSteps\n")
    (folder / f"{module}.py").write_text(source)
    monkeypatch.delenv("KVTOOL_NO_PLUGINS", raising=False)
    monkeypatch.syspath_prepend(str(folder))


def asked(suite: Suite, *words: str) -> Path:
    return suite(jobs=JOB.replace('["mean_layer_error", "mean_output_error"]', json.dumps(words)))


def job(path: Path) -> dict[str, Any]:
    return json.loads((path.parent / "check.json").read_text())["jobs"]["first"]


def outcomes(found: Check) -> dict[str, str]:
    (row,) = (row for row in found.jobs[0].rows if row.name == CELL)
    return {value.metric: value.outcome for value in row.values}


def test_a_metric_that_has_the_name_of_one_of_its_columns_is_recorded_whole(
    suite: Suite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, tmp_path / "site", "bad_steps", "bad_steps_of_a_package", METRIC.format(name="bad_steps"))
    path = asked(suite, "bad_steps")
    check(path, update=True)
    assert set(job(path)["cells"][CELL]) == COLUMNS
    assert job(path)["asked"]["bad_steps"]["parameters"] == {"limit": 0.5}
    (tmp_path / "bad.py").write_text(METRIC.format(name="bad_steps"))
    check(asked(suite, "bad.py:BadSteps"), update=True)
    assert set(job(path)["cells"][CELL]) == COLUMNS
    check(asked(suite, "bad.py:BadSteps:limit=0.1", "mean_bad_steps"), update=True)  # a column of it adds nothing
    assert set(job(path)["cells"][CELL]) == COLUMNS


@pytest.mark.parametrize("name", ["mean_output_error", "output_error_max", "predicted_kl_w8", "ties", "cache_size"])
def test_a_package_that_has_one_of_kvtools_words_is_not_imported(
    suite: Suite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    module = f"imported_by_accident_{name}"
    installed(monkeypatch, tmp_path / "site", name, module, "raise RuntimeError('imported')")
    path = suite("kl_windows = [8]", jobs=JOB.replace('["mean_layer_error", "mean_output_error"]', f'["{name}"]'))
    assert check(path, update=True).ok
    assert module not in sys.modules
    columns = set(job(path)["cells"][CELL])
    assert name in columns or columns > {"mean_cache_tokens"}
    with pytest.raises(KvtoolError) as caught:
        check(asked(suite, f"{name}:limit=1"))
    assert caught.value.code == "suite"
    assert module not in sys.modules


def test_other_parameters_are_another_number(suite: Suite, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.py").write_text(METRIC.format(name="bad_steps"))
    path = asked(suite, "bad.py:BadSteps:limit=0.01", "evicted")
    check(path, update=True)
    assert check(path, strict=True).kind == "identical"
    asked(suite, "bad.py:BadSteps:limit=0.9", "evicted")  # fewer steps are above it
    found = check(path)
    assert not found.ok
    assert outcomes(found) == {**dict.fromkeys(COLUMNS, "moved"), "evicted": "same"}
    assert run(["check", str(path)]) == 1
    said = " ".join(capfd.readouterr().out.split())
    assert "another number, which is not compared" in said
    (value,) = (v for v in found.jobs[0].rows[1].values if v.metric == "bad_steps")
    assert value.changed == ("bad.py:BadSteps:limit=0.01", "bad.py:BadSteps:limit=0.9")
    check(path, update=True)
    assert job(path)["asked"]["bad_steps"]["parameters"] == {"limit": 0.9}


def test_a_default_that_moves_is_another_number_and_other_code_is_none(suite: Suite, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(METRIC.format(name="bad_steps"))
    path = asked(suite, "bad.py:BadSteps")
    check(path, update=True)
    (tmp_path / "bad.py").write_text(METRIC.format(name="bad_steps") + "\n# said otherwise\n")
    assert check(path, strict=True).kind == "identical"
    (tmp_path / "bad.py").write_text(
        METRIC.format(name="bad_steps").replace("limit: float = 0.5", "limit: float = 0.6")
    )
    found = check(path)
    assert set(outcomes(found).values()) == {"moved"}
    assert "{'limit': 0.6}" in found.document()["jobs"][0]["cells"][1]["message"]
