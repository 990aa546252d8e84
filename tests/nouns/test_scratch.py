"""Scratch: folders that go with their process, and what a killed process leaves goes with the next one."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kvtool.scratch import Scratch


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for temporary files that nobody else uses."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_a_folder_goes_with_its_lock(temporary: Path) -> None:
    with Scratch("some") as folder:
        (folder / "deep").mkdir()
        (folder / "deep" / "file").write_text("x")
        assert len(names(temporary)) == 2
    assert names(temporary) == []


def test_what_a_killed_process_left_is_removed_and_what_is_in_use_is_not(temporary: Path) -> None:
    script = (
        "import sys, os, signal, tempfile\n"
        "tempfile.tempdir = sys.argv[1]\n"
        "from kvtool.scratch import Scratch\n"
        "(Scratch('some').path / 'file').write_text('x')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(temporary)])
    left = names(temporary)
    assert len(left) == 2
    other, mine = Scratch("other"), Scratch("some")
    assert not set(left) & set(names(temporary))
    again = Scratch("some")
    assert mine.path.is_dir()
    assert other.path.is_dir()
    for one in (other, mine, again):
        one.remove()
        one.remove()
    assert names(temporary) == []


def test_a_user_s_folder_of_a_similar_name_stays(temporary: Path) -> None:
    for name in ("kvtool-scratch-some-results", "kvtool-scratch-some-RESULTS1", "kvtool-some-abcdefgh"):
        (temporary / name).mkdir()
        (temporary / f"{name}.lock").write_text("")
    before = names(temporary)
    Scratch("some").remove()
    assert names(temporary) == before
