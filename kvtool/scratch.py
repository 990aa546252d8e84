"""Scratch: temporary folders that do not outlive their process for long, however it ended."""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path

from kvtool.errors import KvtoolError
from kvtool.files import Lock

PREFIX = "kvtool-scratch-"
_MADE = re.compile(PREFIX + r"[a-z]+-[a-z0-9_]{8}")
TRIES = 8  # for a name whose lock nobody else holds


class Scratch:
    """A new folder `kvtool-scratch-<kind>-…` among the temporary files. As a context manager it is removed at the end.

    Its lock dies with this process. So what a process that was killed has left is found by the next one that needs a
    folder of the same kind, and removed then.

    Args:
        kind: what it is for, in one word.

    Attributes:
        path: the folder.
    """

    def __init__(self, kind: str) -> None:
        _sweep(kind)
        for left in reversed(range(TRIES)):
            self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{kind}-"))
            try:
                self._lock = Lock(self.path)
                return
            except KvtoolError:  # another process swept between the lock's file and the lock
                shutil.rmtree(self.path, ignore_errors=True)
                if not left:
                    raise

    def remove(self) -> None:
        """Remove the folder; harmless when called twice."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.release()

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *raised: object) -> None:
        self.remove()


def _sweep(kind: str) -> None:
    """Remove the folders of this kind whose process is gone."""
    for file in Path(tempfile.gettempdir()).glob(f"{PREFIX}{kind}-*.lock"):
        folder = file.with_suffix("")
        if not _MADE.fullmatch(folder.name):  # not one of ours, but something that a user called so
            continue
        try:
            lock = Lock(folder)
        except (KvtoolError, OSError):  # in use, or somebody else's
            continue
        shutil.rmtree(folder, ignore_errors=True)
        lock.release()
