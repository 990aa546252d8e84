"""Where a check writes: never over a link, a pipe or the answer itself, and never found out after the work."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from kvtool.check import check
from kvtool.check.places import file_target
from kvtool.cli.main import run
from kvtool.errors import KvtoolError
from kvtool.result import Result

from .conftest import JOB, Suite

KVTOOL = [sys.executable, "-c", "from kvtool.cli.main import main; main()"]


def odd(folder: Path, kind: str) -> Path:
    """Something in `folder` that is no place for a file."""
    path = folder / f"a {kind}.xml"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link to a pipe":
        os.mkfifo(folder / "pipe")
        path.symlink_to("pipe")
    elif kind == "folder":
        path.mkdir()
    elif kind == "link to a folder":
        path.symlink_to(folder)
    elif kind == "link to itself":
        path.symlink_to(path)
    elif kind == "link into no folder":
        path.symlink_to("no/such/file.xml")
    elif kind == "long name":
        path = folder / ("x" * 300)
    else:
        path = folder / "no" / "such.xml"
    return path


ODD = ["pipe", "link to a pipe", "folder", "link to a folder", "link to itself", "link into no folder", "long name"]


@pytest.mark.parametrize("kind", [*ODD, "no folder"])
def test_a_report_that_can_be_no_file_is_refused_before_anything_runs(
    suite: Suite,
    tmp_path: Path,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    path = suite()
    monkeypatch.setattr("kvtool.check.run.replay", None)  # whoever replays now fails
    place = odd(tmp_path, kind)
    before = sorted(p.name for p in tmp_path.iterdir())
    assert run(["check", str(path), "--update", "--junit", str(place)]) == 2
    assert "--junit" in capfd.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == before
    if kind.endswith("pipe"):
        assert place.is_fifo()


def test_a_descriptor_is_no_file(tmp_path: Path) -> None:
    """As /dev/stdout is one where the output goes into a pipe."""
    reader, writer = os.pipe()
    try:
        with pytest.raises(KvtoolError, match="is no file"):
            file_target(Path(f"/proc/self/fd/{writer}"), "--junit")
    finally:
        os.close(reader)
        os.close(writer)


def test_the_file_that_takes_the_answer_is_refused(suite: Suite, tmp_path: Path) -> None:
    path, answer = suite(), tmp_path / "answer.txt"
    with answer.open("w") as file:
        done = subprocess.run(
            [*KVTOOL, "check", str(path), "--update", "--junit", str(answer)], stdout=file, stderr=subprocess.PIPE
        )
    assert done.returncode == 2
    assert b"where the answer itself goes" in done.stderr


def test_a_link_to_a_file_stays_one(suite: Suite, tmp_path: Path) -> None:
    path = suite()
    (tmp_path / "far").mkdir()
    link = tmp_path / "j.xml"
    link.symlink_to("far/real.xml")
    assert run(["check", str(path), "--update", "--junit", str(link)]) == 0
    assert link.is_symlink()
    assert ET.parse(tmp_path / "far" / "real.xml").getroot().get("failures") == "0"


def test_a_baseline_that_is_no_file_is_refused(suite: Suite, tmp_path: Path) -> None:
    path = suite()
    os.mkfifo(tmp_path / "check.json")
    for update in (False, True):
        with pytest.raises(KvtoolError, match="the baseline"):
            check(path, update=update)
    assert (tmp_path / "check.json").is_fifo()


@pytest.mark.parametrize(
    ("name", "words"),
    [("a" * 300, "is too long"), ("é" * 128, "is too long"), ("/", "no letter or digit"), ("..", "no letter or digit")],
)
def test_a_name_that_makes_no_folder_is_refused_where_results_are_kept(
    suite: Suite, tmp_path: Path, name: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = suite(jobs=JOB.replace('"first"', f'"{name}"'))
    check(path, update=True)
    monkeypatch.setattr("kvtool.check.run.replay", None)
    with pytest.raises(KvtoolError, match=words):
        check(path, output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_long_name_that_fits_and_a_file_for_a_folder(suite: Suite, tmp_path: Path) -> None:
    path = suite(jobs=JOB.replace('"first"', f'"{"a" * 255}"'))
    check(path, update=True, output=tmp_path / "out")
    assert Result.load(tmp_path / "out" / ("a" * 255)).entries("cells")
    with pytest.raises(KvtoolError, match="is a file, not a folder"):
        check(path, output=path)


def test_a_suite_behind_a_link_finds_what_lies_beside_the_file(suite: Suite, tmp_path: Path) -> None:
    path = suite()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    link = elsewhere / "gate.toml"
    link.symlink_to(path)
    assert check(link, update=True).baseline == tmp_path / "check.json"
    assert list(elsewhere.iterdir()) == [link]
    assert check(path, strict=True).ok
    assert check(link, strict=True).ok


def test_after_exit_2_the_report_of_a_former_run_does_not_stay(
    suite: Suite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, report = suite(), tmp_path / "j.xml"
    assert run(["check", str(path), "--update", "--junit", str(report)]) == 0
    (tmp_path / "check.json").write_text("{")

    def told() -> ET.Element:
        root = ET.parse(report).getroot()
        for element in (root, root[0]):
            assert [element.get(name) for name in ("tests", "failures", "errors")] == ["1", "0", "1"]
        (error,) = root.iter("error")
        return error

    assert run(["check", str(path), "--junit", str(report)]) == 2
    assert told().get("type") == "baseline"
    assert "cannot be read as a baseline" in (told().text or "")
    assert run(["check", str(path), "--junit", str(report), "--annotations", "gitlab"]) == 2
    assert told().get("type") == "usage"
    for stop, code, kind in ((KeyboardInterrupt(), 130, "interrupted"), (RuntimeError("lost"), 2, "internal")):

        def stopped(*arguments: object, stop: BaseException = stop, **options: object) -> None:
            raise stop

        monkeypatch.setattr("kvtool.check.check", stopped)
        assert run(["check", str(path), "--junit", str(report)]) == code
        assert told().get("type") == kind


@pytest.mark.parametrize("name", ["check.toml", "check.json", "notes.txt"])
def test_a_report_replaces_no_file_of_something_else(
    suite: Suite, tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    path = suite()
    check(path, update=True)
    (tmp_path / "notes.txt").write_text("mine")
    target = path.parent / name if name != "notes.txt" else tmp_path / name
    before = target.read_bytes()
    assert run(["check", str(path), "--junit", str(target)]) == 2
    assert "is no XML file, and stays" in capfd.readouterr().err
    assert target.read_bytes() == before
    report = tmp_path / "report.xml"
    report.touch()
    for _ in range(2):
        assert run(["check", str(path), "--junit", str(report)]) == 0
        assert ET.parse(report).getroot().tag == "testsuites"
