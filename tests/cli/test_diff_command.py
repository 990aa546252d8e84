"""`kvtool diff`: exit codes, what stands on stdout and stderr, and bad input."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from kvtool.cli.main import run
from kvtool.replay import replay

TINY = Path(__file__).resolve().parents[2] / "sample_traces" / "tiny-gqa.zarr"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two results of one trace: one protects 8 newest tokens, the other 4."""
    folder = tmp_path_factory.mktemp("results")
    for name, window in (("a", 8), ("b", 4)):
        replay(TINY, ["knorm", "tova"], ratios=["0.5", "0.75"], sinks=1, window=window, output=folder / name)
    return folder


@pytest.fixture(autouse=True)
def _there(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(results)


def test_equal_results_exit_0_with_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["diff", "a", "a"]) == 0
    out, err = capfd.readouterr()
    assert len(out.splitlines()) == 1
    assert out.startswith("no difference: ")
    assert err.splitlines()[-1].startswith("next: kvtool diff ")


def test_the_exit_code_is_the_verdict_either_way(capfd: pytest.CaptureFixture[str]) -> None:
    codes = {}
    for sides in (("a", "b"), ("b", "a")):
        codes[sides] = run(["diff", *sides, "--json"])
        document = json.loads(capfd.readouterr().out)
        assert document["schema"] == "kvtool.diff/1"
        verdicts = {entry["verdict"] for group in document["groups"] for entry in group["metrics"]}
        assert codes[sides] == int("worse" in verdicts) == int(document["worse"])
    assert 1 in codes.values()


def test_a_wide_tolerance_passes_and_one_metric_has_its_own(capfd: pytest.CaptureFixture[str]) -> None:
    both = next(sides for sides in (["a", "b"], ["b", "a"]) if run(["diff", *sides, "--metric", "mean_layer_error"]))
    judged = ["diff", *both, "--metric", "mean_layer_error"]
    assert run(judged) == 1
    assert run([*judged, "--relative", "100"]) == 0
    assert run([*judged, "--relative", "mean_layer_error=100"]) == 0
    assert run([*judged, "--absolute", "mean_layer_error=100"]) == 0
    assert run([*judged, "--relative", "0", "--relative", "mean_layer_error=100"]) == 0


def test_selectors_compare_two_policies_and_two_ratios(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["diff", "a::knorm@0.75", "a::tova@0.75", "--json"]) in (0, 1)
    (group,) = json.loads(capfd.readouterr().out)["groups"]
    assert (group["policy_a"], group["policy_b"], group["ratio"]) == ("knorm", "tova", 0.75)
    assert run(["diff", "a::knorm@0.5", "a::knorm@0.75"]) == 1
    out = capfd.readouterr().out
    assert "knorm, ratio 0.5 → ratio 0.75: behaviour" in out


def test_sequences_are_told_apart(capfd: pytest.CaptureFixture[str]) -> None:
    run(["diff", "a::knorm@0.5", "b::knorm@0.5", "--sequences", "--json"])
    found = json.loads(capfd.readouterr().out)
    assert [group["sequence"] for group in found["groups"]] == [0, 1]


def test_tokens_limits_what_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    for most in (0, 2):
        run(["diff", "a::knorm@0.5", "b::knorm@0.5", "--tokens", str(most), "--json"])
        (group,) = json.loads(capfd.readouterr().out)["groups"]
        found = group["tokens"]
        assert len([] if found is None else found["lost"]) == 2 * most  # of each of two sequences


def test_markdown_is_all_that_stands_on_stdout(capfd: pytest.CaptureFixture[str]) -> None:
    code = run(["diff", "a", "b", "--markdown"])
    out, err = capfd.readouterr()
    assert code in (0, 1)
    assert out.startswith("### kvtool diff: ")
    assert out.endswith("\n")
    assert not out.endswith("\n\n")
    assert "next: " in err


def test_the_next_command_runs(capfd: pytest.CaptureFixture[str]) -> None:
    import shlex

    run(["diff", "a", "b"])
    hint = capfd.readouterr().err.splitlines()[-1].removeprefix("next: kvtool ").partition(" tells ")[0]
    assert run(shlex.split(hint)) in (0, 1)
    groups = capfd.readouterr().out
    assert "layer 3" in groups


def test_equal_traces_are_read_before_they_are_called_equal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    altered = tmp_path / "altered.zarr"
    shutil.copytree(TINY, altered)
    chunk = max(altered.glob("sequences/0000/layers/00/values/c/**/*"), key=lambda file: file.is_file())
    raw = bytearray(chunk.read_bytes())
    raw[100] ^= 1
    chunk.write_bytes(bytes(raw))
    for sides in ((TINY, altered), (altered, TINY), (altered, altered)):
        assert run(["diff", "--traces", *map(str, sides)]) == 2
        out, err = capfd.readouterr()
        assert out == ""
        assert "is damaged" in err


def test_the_next_command_keeps_apart_what_was_compared(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    import shlex

    schedules = ["prompt-end", "every:8"]
    replay(TINY, ["knorm"], budgets=[24], schedules=schedules, sinks=1, window=8, output=tmp_path / "c")
    run(["diff", f"{tmp_path}/c::knorm@24@prompt-end", f"{tmp_path}/c::knorm@24@every:8", "--tokens", "0"])
    hint = capfd.readouterr().err.splitlines()[-1].removeprefix("next: kvtool ").partition(" tells ")[0]
    assert run([*shlex.split(hint), "--json"]) in (0, 1)
    groups = json.loads(capfd.readouterr().out)["groups"]
    assert groups
    assert {(group["schedule"], group["schedule_b"]) for group in groups} == {("prompt-end", "every:8")}


def test_tokens_of_events_are_told_of_the_whole_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for name, window in (("a", 8), ("b", 4)):
        replay(TINY, ["knorm"], budgets=[24], schedules=["every:8"], sinks=1, window=window, output=tmp_path / name)
    run(["diff", f"{tmp_path}/a", f"{tmp_path}/b", "--by", "event", "--tokens", "3"])
    out = " ".join(capfd.readouterr().out.split())
    assert "no tokens were asked for" not in out
    assert "Tokens: which are kept and lost is told of the whole run only, not event by event." in out
    assert "whole run" in out


def test_traces_are_compared_too(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["diff", "--traces", str(TINY), str(TINY)]) == 0
    assert "same" in capfd.readouterr().out


BAD = {
    "no such result": ["diff", "a", "nowhere"],
    "a trace without --traces": ["diff", str(TINY), "a"],
    "two traces without --traces": ["diff", str(TINY), str(TINY)],
    "no folder before the selector": ["diff", "::knorm", "a"],
    "nothing behind the colons": ["diff", "a::", "b"],
    "only a separator behind the colons": ["diff", "a", "b::@"],
    "no such policy": ["diff", "a::snapkv", "a"],
    "no such ratio": ["diff", "a::knorm@0.9", "b"],
    "unknown place": ["diff", "a", "b", "--by", "laier"],
    "unknown metric": ["diff", "a", "b", "--metric", "mean_layer_eror"],
    "tolerance no number": ["diff", "a", "b", "--relative", "little"],
    "tolerance below 0": ["diff", "a", "b", "--absolute", "-1"],
    "tolerance of no metric": ["diff", "a", "b", "--relative", "nothing=1"],
    "tokens below 0": ["diff", "a", "b", "--tokens", "-1"],
    "two answers": ["diff", "a", "b", "--json", "--markdown"],
    "results as traces": ["diff", "--traces", "a", "b"],
    "traces by layer": ["diff", "--traces", str(TINY), str(TINY), "--by", "layer"],
    "another trace": ["diff", "a", "b", "--trace", "nowhere.zarr"],
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_exits_2_with_one_sentence(case: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(BAD[case]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    lines = err.rstrip("\n").splitlines()
    assert lines[0].startswith("error: ")
    assert "[internal]" not in lines[0]
    assert len(lines) <= 2, err


def test_forgotten_traces_are_pointed_out(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["diff", str(TINY), str(TINY)]) == 2
    error, hint = capfd.readouterr().err.splitlines()
    assert error.endswith("is a trace, no result [usage]")
    assert hint == "hint: --traces compares two traces"
