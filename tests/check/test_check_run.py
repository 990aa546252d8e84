"""Checks from end to end: what passes, what fails, what is refused, what an update writes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from kvtool.check import Check, check
from kvtool.cli.main import run
from kvtool.errors import KvtoolError
from kvtool.files import Lock
from kvtool.metrics.output_error import OutputError
from kvtool.result import Result

from .conftest import DIGESTS, HEAD, JOB, SAMPLES, Suite

SECOND = """
[[jobs]]
name = "second"
policies = ["tova"]
metrics = ["mean_output_error", "layer_error", "evicted_mass", "evicted", "mass_regret"]
"""
BROKEN = """
from dataclasses import dataclass
import torch
from kvtool.policies import Policy

@dataclass(frozen=True)
class Mine(Policy):
    def score(self, state, view):
        return {scores}
"""
GOOD, NAN = "torch.linalg.vector_norm(view.keys, dim=-1)", "view.keys[..., 0] * float('nan')"


def rows(found: Check, job: str = "first") -> dict[str, Any]:
    (one,) = (one for one in found.jobs if one.name == job)
    return {row.name: row for row in one.rows}


def document(path: Path) -> dict[str, Any]:
    return json.loads((path.parent / "check.json").read_text())


def edited(path: Path, change: Any) -> None:
    """Change what the baseline says."""
    file = path.parent / "check.json"
    said = json.loads(file.read_text())
    change(said["jobs"])
    file.write_text(json.dumps(said))


CELL = "knorm @0.5 prompt-end sequence 0"


def test_without_a_baseline_there_is_a_hint_and_then_there_is_one(
    suite: Suite, capfd: pytest.CaptureFixture[str]
) -> None:
    path = suite()
    assert run(["check", str(path)]) == 2
    assert "--update" in capfd.readouterr().err
    assert run(["check", str(path), "--update"]) == 0
    first = (path.parent / "check.json").read_bytes()
    assert run(["check", str(path), "--strict"]) == 0
    assert "kind of the change: identical" in capfd.readouterr().out
    assert run(["check", str(path), "--update"]) == 0
    assert "already says this" in capfd.readouterr().out
    assert (path.parent / "check.json").read_bytes() == first
    assert sorted(p.name for p in path.parent.iterdir()) == ["check.json", "check.toml"]


def test_what_a_baseline_holds(suite: Suite) -> None:
    path = suite(SECOND)
    check(path, update=True)
    jobs = document(path)["jobs"]
    cells = jobs["first"]["cells"]
    assert set(cells) == {f"{p} @0.5 prompt-end sequence 0" for p in ("knorm", "snapkv:window=8", "full", "random")}
    assert jobs["first"]["trace"] == DIGESTS["tiny-gqa"]
    layer = jobs["first"]["decisions"][f"{CELL} layer 3"]
    assert len(layer["digest"]) == 20
    assert layer["kept"] == [64 + 32, 64 + 32]  # half of 128 candidates, and the 32 evaluated tokens
    assert [len(head) for head in layer["heads"]] == [8, 8]
    tova = jobs["second"]["cells"]["tova @0.5 prompt-end sequence 0"]
    assert tova["evicted"] == 2 * 2 * 64
    found = Result.load(_kept(path))
    (cell,) = (c for c in found.entries("cells") if c["policy"] == "tova" and c["sequence"] == 0)
    heads = [r["evicted_mass"] for r in found.entries("rows") if r["policy"] == "tova"]
    assert tova["mean_output_error"] == pytest.approx(cell["mean_output_error"], rel=1e-11)
    assert tova["layer_error"] == pytest.approx(cell["mean_layer_error"], rel=1e-11)  # the mean over layers
    assert tova["evicted_mass"] == pytest.approx(sum(heads) / len(heads), rel=1e-11)  # and over heads


def _kept(path: Path) -> Path:
    check(path, only="second", output=path.parent / "kept", update=True)
    return path.parent / "kept" / "second"


def test_worse_better_within_missing_and_new(suite: Suite, capfd: pytest.CaptureFixture[str]) -> None:
    path = suite("[tolerances]\nmean_layer_error = {relative = 0.1}")
    check(path, update=True)
    was = document(path)["jobs"]["first"]["cells"][CELL]

    def say(metric: str, factor: float) -> Check:
        edited(path, lambda jobs: jobs["first"]["cells"][CELL].update({**was, metric: was[metric] * factor}))
        return check(path)

    found = say("mean_output_error", 1 / 1.5)
    assert (rows(found)[CELL].outcome, rows(found)[CELL].kind, found.ok) == ("worse", "numerics", False)
    found = say("mean_output_error", 1.5)
    assert (rows(found)[CELL].outcome, found.ok) == ("better", True)
    assert run(["check", str(path)]) == 0
    assert "--update" in capfd.readouterr().err.splitlines()[-1]
    found = say("mean_layer_error", 1.05)
    assert (rows(found)[CELL].outcome, found.kind, found.ok) == ("within", "numerics", True)

    edited(path, lambda jobs: jobs["first"]["cells"].update({CELL: {**was, "predicted_kl": 0.5}}))
    assert rows(check(path))[CELL].outcome == "missing"
    edited(path, lambda jobs: jobs["first"]["cells"].update({CELL: {"mean_layer_error": was["mean_layer_error"]}}))
    assert (rows(check(path))[CELL].outcome, check(path).ok, check(path, strict=True).ok) == ("new", True, False)
    edited(path, lambda jobs: jobs["first"]["cells"].update({CELL: {**was, "mean_output_error": None}}))
    assert (rows(check(path))[CELL].outcome, check(path).ok) == ("new", True)
    edited(path, lambda jobs: jobs["first"]["cells"].update({CELL: was, "gone @0.5 prompt-end sequence 0": was}))
    found = check(path)
    assert (rows(found)["gone @0.5 prompt-end sequence 0"].outcome, found.ok) == ("missing", False)


def test_a_number_that_is_null_now_fails(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    path = suite()
    check(path, update=True)
    combine = OutputError.combine
    monkeypatch.setattr(
        OutputError, "combine", lambda self, partials: {**combine(self, partials), "mean_output_error": None}
    )
    found = check(path)
    assert {row.outcome for row in rows(found).values()} == {"missing"}
    assert not found.ok
    assert "mean_output_error is null now" in found.document()["jobs"][0]["cells"][0]["message"]


def test_a_metric_of_another_version_is_not_compared(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    path = suite()
    check(path, update=True)
    edited(path, lambda jobs: jobs["first"]["metrics"].update(mean_output_error=0))
    found = check(path)
    assert not found.ok
    assert "another number, which is not compared" in found.document()["jobs"][0]["cells"][0]["message"]


def test_settings_that_differ_are_said(suite: Suite) -> None:
    check(suite(), update=True)
    (job,) = check(suite("window = 4")).jobs
    assert job.notes == ("window is 4, the baseline was recorded with 8",)


def test_a_failing_job_is_a_failure_and_the_others_run(suite: Suite, capfd: pytest.CaptureFixture[str]) -> None:
    path = suite('[[jobs]]\nname = "mine"\npolicies = ["mine.py:Mine"]\n' + SECOND)
    (path.parent / "mine.py").write_text(BROKEN.format(scores=GOOD))
    check(path, update=True)
    whole = (path.parent / "check.json").read_bytes()
    assert b"mine.py:Mine @0.5" in whole  # as the suite names it, not as this machine does
    assert str(path.parent).encode() not in whole
    for scores, code in ((NAN, "policy-broken"), ("3", "policy-broken"), ("(", "policy-unknown")):
        (path.parent / "mine.py").write_text(BROKEN.format(scores=scores))
        found = check(path)
        errors = {job.name: job.error.code for job in found.jobs if job.error is not None}
        assert errors == {"mine": code}
        assert not found.ok
        assert {row.outcome for row in (*rows(found).values(), *rows(found, "second").values())} == {"same"}
        assert run(["check", str(path)]) == 1
        assert f"[{code}]" in " ".join(capfd.readouterr().out.split())
        assert run(["check", str(path), "--update"]) == 2
        assert "[job-failed]" in capfd.readouterr().err
        assert (path.parent / "check.json").read_bytes() == whole


def test_a_changed_trace_is_refused_before_anything_runs(
    suite: Suite, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = suite()
    check(path, update=True)
    monkeypatch.setattr("kvtool.check.run.replay", None)  # whoever replays now fails
    other = DIGESTS["smollm2"]
    path = suite(head=HEAD.replace(DIGESTS["tiny-gqa"], other))
    for more in ([], ["--update"]):
        assert run(["check", str(path), *more]) == 2
        error = capfd.readouterr().err
        assert "trace 'tiny'" in error
        assert DIGESTS["tiny-gqa"] in error
        assert other in error
        assert "[trace-changed]" in error
    # a trace that no chosen job names is looked at too
    head = HEAD + f'[traces.other]\npath = "{SAMPLES / "smollm2.zarr"}"\ndigest = "{DIGESTS["tiny-gqa"]}"\n'
    assert run(["check", str(suite(head=head)), "--only", "first"]) == 2
    assert "trace 'other'" in capfd.readouterr().err


def test_numbers_of_two_traces_are_not_compared(suite: Suite) -> None:
    path = suite()
    check(path, update=True)
    edited(path, lambda jobs: jobs["first"].update(trace=DIGESTS["smollm2"]))
    with pytest.raises(KvtoolError) as caught:
        check(path)
    assert caught.value.code == "trace-changed"
    assert check(path, update=True).updated
    assert document(path)["jobs"]["first"]["trace"] == DIGESTS["tiny-gqa"]


def test_verify_looks_at_every_byte(suite: Suite, tmp_path: Path) -> None:
    copy = tmp_path / "copy.zarr"
    shutil.copytree(SAMPLES / "tiny-gqa.zarr", copy)
    head = HEAD.replace(str(SAMPLES / "tiny-gqa.zarr"), "copy.zarr")
    path = suite(head=head)
    check(path, update=True)
    chunk = copy / "sequences" / "0001" / "layers" / "05" / "keys" / "c" / "0" / "0" / "0"  # which no job reads
    raw = bytearray(chunk.read_bytes())
    raw[100] ^= 1
    chunk.write_bytes(raw)
    assert check(path).ok
    with pytest.raises(KvtoolError) as caught:
        check(suite(head="verify = true\n" + head))
    assert caught.value.code == "trace-damaged"


def test_only_some_jobs_are_updated_and_jobs_that_are_gone_are_dropped(suite: Suite) -> None:
    path = suite(SECOND)
    check(path, update=True)
    edited(path, lambda jobs: [job["cells"].clear() for job in jobs.values()])
    found = check(path, update=True, only=["second"])
    assert [job.name for job in found.jobs] == ["second"]
    jobs = document(path)["jobs"]
    assert jobs["first"]["cells"] == {}
    assert len(jobs["second"]["cells"]) == 3
    suite()  # the second job is gone
    assert check(path, only="first").ok  # new cells only
    left = check(path)
    assert not left.ok
    assert left.counts()["missing"] == 3
    assert set(document(path)["jobs"]) == {"first", "second"}
    found = check(path, update=True)
    assert (found.dropped, found.updated, found.ok) == (("second",), True, True)
    assert set(document(path)["jobs"]) == {"first"}
    with pytest.raises(KvtoolError) as caught:
        check(path, only="secnd")
    assert caught.value.code == "usage"


def test_an_update_leaves_lines_alone_that_rounding_moved(suite: Suite) -> None:
    path = suite()
    check(path, update=True)

    def nudge(jobs: dict[str, Any]) -> None:
        for cell in jobs["first"]["cells"].values():
            cell.update({metric: value * (1 + 3e-12) for metric, value in cell.items()})

    edited(path, nudge)
    nudged = document(path)
    check(path, update=True)
    assert document(path) == nudged


def test_an_update_leaves_nothing_that_the_tolerance_calls_worse(suite: Suite) -> None:
    exact = "[tolerances]\nmean_output_error = {relative = 0, absolute = 0}\n"
    path = suite(exact)
    check(path, update=True)
    recorded = document(path)
    cell = recorded["jobs"]["first"]["cells"][CELL]
    edited(
        path, lambda jobs: jobs["first"]["cells"][CELL].update({name: one * (1 - 3e-12) for name, one in cell.items()})
    )
    assert rows(check(path))[CELL].outcome == "worse"
    assert check(path, update=True).updated
    assert document(path)["jobs"]["first"]["cells"][CELL]["mean_output_error"] == cell["mean_output_error"]
    assert document(path)["jobs"]["first"]["cells"][CELL]["mean_layer_error"] != cell["mean_layer_error"]
    assert check(path).ok


def test_results_are_kept_on_request_and_not_overwritten(suite: Suite, tmp_path: Path) -> None:
    path = suite('[[jobs]]\nname = "a/b: c"\npolicies = ["tova"]')
    out = tmp_path / "out"
    check(path, update=True, output=out)
    assert sorted(p.name for p in out.iterdir()) == ["a-b-c", "first"]
    assert {c["policy"] for c in Result.load(out / "first").entries("cells")} >= {"knorm"}
    with pytest.raises(KvtoolError) as caught:
        check(path, output=out)
    assert caught.value.code == "output-exists"
    assert check(path, output=out, force=True).ok
    twins = '[[jobs]]\nname = "a b"\npolicies = ["tova"]\n[[jobs]]\nname = "a/b"\npolicies = ["tova"]'
    with pytest.raises(KvtoolError, match="two jobs would be kept"):
        check(suite(twins), update=True, output=tmp_path / "other")


def test_paths_are_those_of_the_suite_wherever_one_stands(
    suite: Suite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "mine.py").write_text(BROKEN.format(scores=GOOD))
    path = suite(jobs='[[jobs]]\nname = "mine"\npolicies = ["mine.py:Mine"]')
    check(path, update=True)
    for folder in ("far", "."):
        monkeypatch.chdir(tmp_path / folder)
        assert check(Path("..") / "check.toml" if folder == "far" else "check.toml").ok
        assert Path.cwd() == (tmp_path / folder).resolve()


def test_a_metric_of_a_file_is_run_with_all_its_columns(suite: Suite, tmp_path: Path) -> None:
    home = Path(__file__).resolve().parents[2] / "docs" / "example_package" / "kvtool_example" / "tail_error.py"
    shutil.copy(home, tmp_path / "tail.py")
    path = suite(jobs=JOB.replace("mean_output_error", "tail.py:TailError:share=0.5"))
    check(path, update=True)
    cell = document(path)["jobs"]["first"]["cells"][CELL]
    assert set(cell) == {"mean_layer_error", "mean_tail_error", "tail_error"}
    assert cell["tail_error"] == pytest.approx(cell["mean_tail_error"], rel=1e-11)
    assert check(path).ok
    edited(path, lambda jobs: jobs["first"]["cells"][CELL].update(mean_tail_error=cell["mean_tail_error"] / 2))
    assert rows(check(path))[CELL].outcome == "worse"  # its own direction


def test_the_json_document(suite: Suite, capfd: pytest.CaptureFixture[str]) -> None:
    path = suite()
    check(path, update=True)
    edited(path, lambda jobs: jobs["first"]["cells"][CELL].update(mean_output_error=0.1))
    capfd.readouterr()
    assert run(["check", str(path), "--json"]) == 1
    said = json.loads(capfd.readouterr().out)
    assert (said["schema"], said["ok"], said["kind"]) == ("kvtool.check/1", False, "numerics")
    (cell,) = (cell for cell in said["jobs"][0]["cells"] if not cell["passes"])
    (metric,) = (metric for metric in cell["metrics"] if metric["outcome"] == "worse")
    assert metric["difference"] == metric["new"] - 0.1
    assert (metric["metric"], metric["direction"]) == ("mean_output_error", "lower")


def test_a_damaged_baseline_can_be_left_behind_and_it_is_said(suite: Suite, capfd: pytest.CaptureFixture[str]) -> None:
    path = suite(SECOND)
    check(path, update=True)
    whole = (path.parent / "check.json").read_bytes()
    merged = whole.replace(b' "schema"', b'=======\n "schema"')
    (path.parent / "check.json").write_bytes(merged)
    for more in ([], ["--update"], ["--force"], ["--update", "--force", "--only", "first"]):
        assert run(["check", str(path), *more]) == 2
        err = capfd.readouterr().err
        assert "[baseline]" in err
        assert f"kvtool check {path} --update --force" in err
        assert (path.parent / "check.json").read_bytes() == merged
    assert run(["check", str(path), "--update", "--force"]) == 0
    said = " ".join(capfd.readouterr().out.split())
    assert "everything is recorded anew, nothing was taken over" in said
    assert "cannot be read as a baseline" in said
    assert (path.parent / "check.json").read_bytes() == whole
    assert check(path, update=True, force=True).anew is None  # a whole one is not left behind
    assert check(path, strict=True).ok


def test_two_suites_do_not_share_a_baseline(suite: Suite) -> None:
    path = suite()
    check(path, update=True)
    other = path.with_name("other.toml")
    other.write_text(path.read_text())
    for update in (False, True):
        with pytest.raises(KvtoolError, match=r"baseline of another suite, 'check\.toml'"):
            check(other, update=update)
    assert "another suite" in (check(other, update=True, force=True).anew or "")  # as after renaming it
    assert check(other, strict=True).ok


def test_a_policy_that_is_gone_is_said_once(suite: Suite, capfd: pytest.CaptureFixture[str]) -> None:
    check(suite(), update=True)
    path = suite(jobs=JOB.replace('"knorm", ', ""))
    found = check(path)
    assert (rows(found)[CELL].outcome, rows(found)[CELL].gone, found.ok) == ("missing", True, False)
    assert run(["check", str(path)]) == 1
    said = " ".join(capfd.readouterr().out.split())
    assert said.count("the cell is gone") == 1
    assert "mean_layer_error" not in said


def test_what_to_do_next_is_what_can_be_done(suite: Suite, capfd: pytest.CaptureFixture[str]) -> None:
    path = suite('[[jobs]]\nname = "mine"\npolicies = ["mine.py:Mine"]\n')
    (path.parent / "mine.py").write_text(BROKEN.format(scores=GOOD))
    check(path, update=True)
    (path.parent / "mine.py").write_text(BROKEN.format(scores=NAN))
    capfd.readouterr()
    assert run(["check", str(path)]) == 1
    step = capfd.readouterr().err.splitlines()[-1]
    assert "mend what failed" in step
    assert "accepts what moved" not in step
    (path.parent / "mine.py").write_text(BROKEN.format(scores="-" + GOOD))
    assert run(["check", str(path)]) == 1
    assert "--update accepts them" in capfd.readouterr().err.splitlines()[-1]
    lock = Lock(path.parent / "check.json")
    try:
        assert run(["check", str(path), "--update"]) == 2
    finally:
        lock.release()
    err = capfd.readouterr().err
    assert "[locked]" in err
    assert "-o" not in err.splitlines()[-1]


def test_names_cannot_speak_to_the_terminal(suite: Suite, capfd: pytest.CaptureFixture[str]) -> None:
    path = suite(jobs=JOB.replace('"first"', '"a\\u001b[31m\\nb [bold]"').replace('"knorm"', '"mine.py:Mine"'))
    (path.parent / "mine.py").write_text(BROKEN.format(scores=GOOD))
    assert run(["check", str(path), "--update"]) == 0
    (path.parent / "mine.py").write_text(BROKEN.format(scores="(_ for _ in ()).throw(ValueError('\\x1b[2J'))"))
    assert run(["check", str(path)]) == 1
    out, err = capfd.readouterr()
    assert "\x1b" not in out + err
    assert "a\\x1b[31m\\nb [bold]" in out


@pytest.mark.parametrize("place", [b"keys", b"queries"])
def test_a_trace_that_turns_out_to_be_damaged_is_no_finding(
    suite: Suite, tmp_path: Path, place: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy.zarr"
    shutil.copytree(SAMPLES / "tiny-gqa.zarr", copy)
    path = suite(head=HEAD.replace(str(SAMPLES / "tiny-gqa.zarr"), "copy.zarr"))
    check(path, update=True)
    chunk = copy / "sequences" / "0000" / "layers" / "03" / place.decode() / "c" / "0" / "0" / "0"
    raw = bytearray(chunk.read_bytes())
    raw[100] ^= 1
    chunk.write_bytes(raw)
    for more in ([], ["--update"]):
        assert run(["check", str(path), *more]) == 2
        err = capfd.readouterr().err
        assert "[trace-damaged]" in err
        assert "job 'first', trace 'tiny'" in err


@pytest.mark.parametrize(
    ("code", "refused"),
    [("trace-damaged", True), ("trace-unsafe", True), ("trace-format", True), ("trace-lacks", False)],
)
def test_a_trace_that_lacks_something_is_whole(
    suite: Suite, monkeypatch: pytest.MonkeyPatch, code: str, refused: bool
) -> None:
    path = suite()
    check(path, update=True)

    def fails(*arguments: Any, **options: Any) -> None:
        raise KvtoolError(code, "as planted")

    monkeypatch.setattr("kvtool.check.run.replay", fails)
    assert run(["check", str(path)]) == (2 if refused else 1)
