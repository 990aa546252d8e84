"""Places: where a check writes, refused before minutes of work go into it."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path

from kvtool.errors import KvtoolError

MOST_NAME_BYTES = 255  # of a file or folder, on every usual file system


def file_target(path: Path, what: str) -> Path:
    """The file behind `path`, links followed: files are put in place by renaming, which would otherwise replace the
    link itself, or a device.

    Args:
        what: names it in the message.

    Raises:
        KvtoolError: code `usage` where there is something other than a regular file, or where none can be made.
    """
    try:
        real = path.resolve()
        # Not `real`: a link of /proc leads to a pipe that has no path.
        found = path.stat() if path.exists() else None
    except (OSError, RuntimeError) as error:
        raise KvtoolError("usage", f"{what} {path} leads nowhere: {error}", "name a file in a folder") from error
    if found is not None and not stat.S_ISREG(found.st_mode):
        raise KvtoolError("usage", f"{what} {path} is no file", "name a file in an existing folder")
    if found is not None and any(_is_stream(found, stream) for stream in (1, 2)):
        raise KvtoolError("usage", f"{what} {path} is where the answer itself goes", "name another file")
    if not real.parent.is_dir() or len(os.fsencode(real.name)) > MOST_NAME_BYTES:
        raise KvtoolError("usage", f"{what} {path} is no file in an existing folder")
    return real


def report_target(path: Path, option: str) -> Path:
    """The file behind `path` for an XML report; one that is there is replaced only if it is XML itself.

    Raises:
        KvtoolError: as `file_target`, and `output-exists` for a file of something else, a suite perhaps.
    """
    real = file_target(path, option)
    if real.exists():
        with real.open("rb") as file:
            start = file.read(5)
        if start not in (b"", b"<?xml"):
            raise KvtoolError("output-exists", f"{option} {path} is no XML file, and stays", "name another file")
    return real


def _is_stream(found: os.stat_result, stream: int) -> bool:
    try:
        return os.path.samestat(found, os.fstat(stream))
    except OSError:  # closed
        return False


def folders_of(names: Iterable[str], output: Path | None, force: bool) -> dict[str, Path]:
    """Name of a job -> where its result is kept; empty without `output`.

    Raises:
        KvtoolError: `usage` for a name that makes no folder, or where two make one; `output-exists` for a result
            without `force`.
    """
    found: dict[str, Path] = {}
    if output is None:
        return found
    if output.exists() and not output.is_dir():
        raise KvtoolError("usage", f"{output} is a file, not a folder for results")
    for name in names:
        word = re.sub(r"[^\w.-]+", "-", name).strip("-.")
        if not word or len(os.fsencode(word)) > MOST_NAME_BYTES:
            why = "is too long for the name of a folder" if word else "has no letter or digit to name a folder by"
            raise KvtoolError("usage", f"job {name!r} {why}", "give the job another name, or leave out -o")
        folder = output / word
        if folder in found.values():
            raise KvtoolError("usage", f"two jobs would be kept in {folder}", "give them names that differ in letters")
        if folder.exists() and not folder.is_dir():
            raise KvtoolError("usage", f"{folder} is a file, not a folder for results")
        if (folder / "manifest.json").exists() and not force:
            raise KvtoolError("output-exists", f"{folder} holds a result already", "choose another -o, or add --force")
        found[name] = folder
    return found
