"""Publish: a trace is built beside its place, under a lock, and appears there by one rename.

Beside `run.zarr` a writer keeps `run.zarr.lock` (held by flock, so it dies with the process) and
builds `run.zarr.partial-<pid>`. An older trace is renamed to `run.zarr.replaced-<pid>`, the new
one is renamed in, and only then the older one is deleted: no moment exists at which the place
holds half a trace.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from kvtool.errors import KvtoolError
from kvtool.files import Lock, fsync_folder, writing
from kvtool.trace.layout import COMMIT

WRITING = ".writing"


def siblings(path: Path, kind: str) -> list[Path]:
    """Folders `<name>.<kind>-<pid>` beside `path`, oldest first."""
    pattern = re.compile(re.escape(f"{path.name}.{kind}-") + r"\d+\Z")
    parent = path.parent
    found = [entry for entry in parent.iterdir() if pattern.match(entry.name)] if parent.is_dir() else []
    return sorted(found, key=lambda entry: (entry.stat().st_mtime, entry.name))


class Publication:
    """One attempt to write a trace at `path`.

    Args:
        path: where the finished trace shall appear.
        force: replace a trace that is already there.

    Raises:
        KvtoolError: `output-exists`, `locked`, `disk-full` or `write-failed`.
    """

    def __init__(self, path: Path, *, force: bool) -> None:
        self.path = Path(os.path.abspath(path))
        self.partial = self.path.with_name(f"{self.path.name}.partial-{os.getpid()}")
        if not self.path.parent.is_dir():
            raise KvtoolError("file-missing", f"the folder {self.path.parent} does not exist", "create it first")
        with writing(self.path):
            self._lock = Lock(self.path)
        try:
            with writing(self.path):
                self._clear_leftovers()
                self._refuse_existing(force)
                (self.partial / WRITING).mkdir(parents=True)
                fsync_folder(self.path.parent)
        except BaseException:
            self.abandon()
            raise

    def _clear_leftovers(self) -> None:
        """Remove what dead writers left. We hold the lock, so nobody alive owns any of it."""
        replaced = siblings(self.path, "replaced")
        if replaced and not self.path.exists():
            replaced.pop().rename(self.path)  # killed between its two renames: the older trace comes back
        for leftover in [*replaced, *siblings(self.path, "partial")]:
            shutil.rmtree(leftover)

    def _refuse_existing(self, force: bool) -> None:
        if not (self.path.exists() or self.path.is_symlink()):
            return
        if not force:
            raise KvtoolError("output-exists", f"{self.path} is already there", "--force replaces it")
        if self.path.is_symlink() or not (self.path / COMMIT).is_file():
            raise KvtoolError(
                "output-exists", f"{self.path} is there and is no trace, so it is not replaced", "choose another -o"
            )

    def publish(self) -> None:
        """Rename the finished trace into its place. Its files and folders must be fsynced already."""
        with writing(self.path):
            shutil.rmtree(self.partial / WRITING)
            fsync_folder(self.partial)
            replaced = self.path.with_name(f"{self.path.name}.replaced-{os.getpid()}")
            had_older = self.path.exists()
            if had_older:
                self.path.rename(replaced)
            self.partial.rename(self.path)
            fsync_folder(self.path.parent)
            if had_older:
                shutil.rmtree(replaced)
        self._lock.release()

    def abandon(self) -> None:
        """Remove everything this attempt wrote; the place itself stays as it was."""
        shutil.rmtree(self.partial, ignore_errors=True)
        self._lock.release()
