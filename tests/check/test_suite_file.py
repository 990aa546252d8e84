"""Suites that are refused, each in one sentence that names the file and the place, before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtool.check import check
from kvtool.check.suite import read_suite
from kvtool.cli.main import run
from kvtool.errors import KvtoolError

from .conftest import DEFAULTS, DIGESTS, HEAD, JOB, SAMPLES, Suite

BAD = {
    "not TOML": ({"head": "baseline ="}, "is not TOML"),
    "unknown key": ({"further": "ratio = [0.5]"}, "has no key 'ratio'"),
    "unknown top key": ({"head": 'basline = "x"\n' + HEAD}, "has no key 'basline'"),
    "no baseline": ({"head": HEAD.replace("baseline", "#")}, "baseline is missing"),
    "no jobs": ({"jobs": ""}, "jobs is missing"),
    "job without a name": ({"jobs": JOB.replace('name = "first"', "")}, "job 1: name is missing"),
    "job without policies": ({"jobs": '[[jobs]]\nname = "x"'}, "policies is missing"),
    "two jobs of one name": ({"further": JOB}, "two jobs are called 'first'"),
    "unknown trace": ({"further": 'trace = "tony"'}, "there is no trace 'tony'"),
    "short digest": ({"head": HEAD.replace(DIGESTS["tiny-gqa"], "59d7")}, "digest is 64 hex digits"),
    "ratios and budgets": ({"further": "ratios = [0.5]\nbudgets = [8]"}, "ratios and budgets were both given"),
    "budget that is no number": ({"further": 'budgets = ["8"]'}, "each of its entries is a whole number"),
    "empty list": ({"further": "schedules = []"}, "schedules is a list with something in it"),
    "decisions as a word": ({"further": 'decisions = "yes"'}, "decisions is true or false"),
    "sinks as a flag": ({"further": "sinks = true"}, "sinks is a whole number"),
    "layers nonsense": ({"further": 'layers = "5-2"'}, "is not a list of ids"),
    "layer not there": ({"further": "layers = [9]"}, "the trace has no layer 9"),
    "unknown policy": ({"further": "", "jobs": JOB.replace("knorm", "knrom")}, "there is no policy 'knrom'"),
    "policy file not there": ({"jobs": JOB.replace('"knorm"', '"no.py:No"')}, "no.py does not exist"),
    "ratio 1.5": ({"further": "ratios = [1.5]"}, "1.5"),
    "window below 0": ({"further": "window = -8"}, "job 'first': window is a whole number from 0 on"),
    "sinks beyond all": ({"further": "sinks = 3000000000"}, "job 'first': sinks is a whole number from 0 on"),
    "budget 0": ({"further": "budgets = [0]"}, "job 'first': budgets: budget 0 keeps no token"),
    "evaluate nonsense": ({"further": 'evaluate = "dead"'}, "job 'first': evaluate: 'dead' is unknown"),
    "precision nonsense": ({"further": 'precision = "float16"'}, "job 'first': precision: 'float16' is unknown"),
    "no window of steps": ({"further": "kl_windows = [0]"}, "kl_windows is a list, and each of its entries is a whole"),
    "interval 0": ({"further": 'schedules = ["every:0"]'}, "job 'first': schedules: every 0 is too small"),
    "pool over several events": (
        {"further": 'evaluate = "pool"\nschedules = ["every:16"]\nbudgets = [40]'},
        "job 'first': evaluate pool speaks of one event",
    ),
    "mark without a budget": (
        {"further": 'schedules = ["high-water:64"]'},
        "job 'first': high-water 64 needs a budget in tokens below it",
    ),
    "unknown schedule": ({"further": 'schedules = ["evry:3"]'}, "evry"),
    "unknown metric": ({"jobs": JOB.replace("mean_output_error", "mean_output_eror")}, "no metric 'mean_output_eror'"),
    "tolerance of no column": ({"further": "[tolerances]\npredicted_kl = {relative = 1}"}, "no job has the column"),
    "negative tolerance": ({"further": "[tolerances]\ndefault = {relative = -1}"}, "relative is a number from 0 on"),
    "nan tolerance": ({"further": "[tolerances]\ndefault = {relative = nan}"}, "relative is a number from 0 on"),
    "unknown part of a tolerance": ({"further": "[tolerances]\ndefault = {rel = 1}"}, "has no key 'rel'"),
    "verify as a word": ({"head": 'verify = "no"\n' + HEAD}, "verify is true or false"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_suite_is_refused(case: str, suite: Suite, capfd: pytest.CaptureFixture[str]) -> None:
    parts, words = BAD[case]
    path = suite(parts.get("further", ""), **{key: value for key, value in parts.items() if key != "further"})
    with pytest.raises(KvtoolError) as caught:
        check(path, update=True)
    assert caught.value.code == "suite"
    assert words in caught.value.message
    assert str(path) in caught.value.message
    assert run(["check", str(path), "--update"]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert "--" not in err.replace(str(path), "")  # a suite has keys, no options
    assert "-b " not in err
    assert sorted(p.name for p in path.parent.iterdir()) == ["check.toml"]


def test_a_near_word_is_offered(suite: Suite) -> None:
    with pytest.raises(KvtoolError) as caught:
        read_suite(suite("polices = ['all']"))
    assert caught.value.hint is not None
    assert "did you mean policies?" in caught.value.hint


def test_a_suite_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(KvtoolError) as caught:
        check(tmp_path / "check.toml")
    assert caught.value.code == "file-missing"


def test_what_a_suite_says(suite: Suite) -> None:
    further = """
[[jobs]]
name = "second"
policies = ["all"]
budgets = [40]
layers = "0,3-5"
metrics = ["ties"]
decisions = false
[tolerances]
mean_output_error = { absolute = 0.5 }
default = { relative = 0.25 }
"""
    found = read_suite(suite(further))
    first, second = found.jobs
    assert first.options["ratios"] == ("0.5",)  # as it was typed, so that the decimal is exact
    assert "ratios" not in second.options  # its budgets stand instead of the ratios for all
    assert (second.options["budgets"], second.options["layers"]) == ((40,), [0, 3, 4, 5])
    assert (first.decisions, second.decisions, second.metrics) == (True, False, ("ties",))
    assert found.tolerance("mean_output_error").absolute == 0.5
    assert found.tolerance("mean_output_error").relative == 0.25
    assert found.tolerance("anything").relative == 0.25
    assert found.traces["tiny"].path == SAMPLES / "tiny-gqa.zarr"
    assert found.baseline == found.path.parent / "check.json"


def test_defaults_hold_for_every_job_and_a_job_may_say_otherwise(suite: Suite) -> None:
    defaults = DEFAULTS.replace("sinks = 1", "sinks = 2")
    assert read_suite(suite("", defaults=defaults)).jobs[0].options["sinks"] == 2
    assert read_suite(suite("sinks = 3", defaults=defaults)).jobs[0].options["sinks"] == 3
