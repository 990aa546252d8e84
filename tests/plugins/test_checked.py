"""Plug-ins in suites of kvtool check: they run by name, a broken one breaks its job, and --no-plugins refuses them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from made_up import METRIC, POLICY, Install

from kvtool.check import check
from kvtool.cli.main import run

TINY = Path(__file__).resolve().parents[2] / "sample_traces" / "tiny-gqa.zarr"
DIGESTS = dict(line.split() for line in (TINY.parent / "DIGESTS").read_text().splitlines())
SUITE = f"""
baseline = "check.json"
[traces.tiny]
path = "{TINY}"
digest = "{DIGESTS["tiny-gqa"]}"
[defaults]
trace = "tiny"
ratios = [0.5]
layers = [0]
sequences = [0]
window = 8
[tolerances]
default = {{ relative = 1e-5 }}
[[jobs]]
name = "own"
policies = ["knorm"]
[[jobs]]
name = "plug-ins"
policies = ["newest:power=2"]
metrics = ["worst:times=2", "mean_output_error"]
"""


@pytest.fixture
def suite(tmp_path: Path, install: Install) -> Path:
    install("acme", policies={"newest": "acme_policy:Newest"}, acme_policy=POLICY)
    install("beta", metrics={"worst": "beta_metric:Worst"}, beta_metric=METRIC)
    path = tmp_path / "check.toml"
    path.write_text(SUITE)
    return path


def test_a_metric_that_is_named_is_checked_with_all_its_columns(suite: Path) -> None:
    check(suite, update=True)
    job = json.loads((suite.parent / "check.json").read_text())["jobs"]["plug-ins"]
    cell = job["cells"]["newest:power=2.0 @0.5 prompt-end sequence 0"]
    assert set(cell) == {"worst_tokens", "worst_layer", "worst_cell", "layers_seen", "mean_output_error"}
    assert cell["layers_seen"] == 1
    assert cell["worst_layer"] == pytest.approx(cell["worst_cell"])
    assert job["metrics"]["worst_cell"] == 3  # its version
    assert check(suite, strict=True).ok


def test_a_column_of_it_may_have_a_tolerance(suite: Path) -> None:
    suite.write_text(SUITE.replace("[tolerances]", "[tolerances]\nworst_cell = { relative = 1.0 }"))
    check(suite, update=True)
    baseline = suite.parent / "check.json"
    said = json.loads(baseline.read_text())
    for cell in said["jobs"]["plug-ins"]["cells"].values():
        cell["worst_cell"] *= 0.75
    baseline.write_text(json.dumps(said))
    assert check(suite).ok
    suite.write_text(SUITE)
    assert not check(suite).ok


def test_a_broken_one_breaks_its_job_alone(tmp_path: Path, install: Install) -> None:
    install("acme", policies={"newest": "acme_policy:Newest"}, acme_policy="import nothing_of_that_name")
    install("beta", metrics={"worst": "beta_metric:Worst"}, beta_metric=METRIC)
    path = tmp_path / "check.toml"
    path.write_text(SUITE)
    check(path, update=True, only="own")
    found = check(path)
    assert {job.name: job.error.code for job in found.jobs if job.error} == {"plug-ins": "plugin-broken"}
    assert [job.kind for job in found.jobs] == ["identical", "unknown"]


def test_without_plug_ins_a_suite_that_names_one_is_refused(suite: Path, capfd: pytest.CaptureFixture[str]) -> None:
    check(suite, update=True)
    for words in (["check", str(suite), "--no-plugins"], ["--no-plugins", "check", str(suite)]):
        assert run(words) == 2
        error = capfd.readouterr().err
        assert "job 'plug-ins'" in error
        assert "[suite]" in error
    assert run(["check", str(suite)]) == 0
