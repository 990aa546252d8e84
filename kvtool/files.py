"""Files that are there whole or not at all, and one writer at a time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path

from kvtool.errors import KvtoolError

_elsewhere: ContextVar[Mapping[str, str] | None] = ContextVar("kvtool_elsewhere", default=None)


@contextlib.contextmanager
def named_elsewhere(places: Mapping[str, str]) -> Iterator[None]:
    """Inside, a path that was typed in another working folder means what it meant there.

    Args:
        places: path as typed -> absolute path.
    """
    token = _elsewhere.set(places)
    try:
        yield
    finally:
        _elsewhere.reset(token)


def located(typed: str | os.PathLike[str]) -> Path:
    """Where the file or folder lies that somebody named."""
    return Path((_elsewhere.get() or {}).get(os.fspath(typed), os.fspath(typed)))


FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextlib.contextmanager
def writing(path: Path, hint: str = "free some space, or write elsewhere") -> Iterator[None]:
    """Turn the operating system's refusals into one clear error about `path`.

    Raises:
        KvtoolError: `disk-full` (with `hint`) or `write-failed`.
    """
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise KvtoolError(
                "disk-full",
                f"the disk is full (or a quota or file size limit is reached) while writing {path}: {error.strerror}",
                hint,
            ) from error
        raise KvtoolError("write-failed", f"cannot write {path}: {error.strerror or error}") from error


def fsync_folder(path: Path) -> None:
    """Make the names inside a folder survive a power loss."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def fsync_file(path: Path) -> None:
    """Make a file's bytes survive a power loss."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_durably(path: Path, raw: bytes) -> None:
    """Write a small file so that it is there whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


class Lock:
    """A lock file `<name>.lock` beside `path`, held by flock, so that it dies with its process.

    Raises:
        KvtoolError: code `locked` where another living process holds it.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.with_name(path.name + ".lock")
        self._handle = self._take(path)

    def _take(self, path: Path) -> int:
        while True:
            handle = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The former holder may have unlinked the file between our open and our flock.
                if os.path.exists(self._file) and os.path.samestat(os.fstat(handle), os.stat(self._file)):
                    os.ftruncate(handle, 0)
                    os.write(handle, f"{os.getpid()}\n".encode())
                    return handle
                os.close(handle)
            except BlockingIOError:
                owner = os.read(handle, 32).decode(errors="replace").strip() or "unknown"
                os.close(handle)
                raise KvtoolError(
                    "locked",
                    f"another process (pid {owner}) is writing {path}",
                    "wait for it, or write to another place with -o",
                ) from None
            except BaseException:
                with contextlib.suppress(OSError):
                    os.close(handle)
                raise

    def release(self) -> None:
        """Let others write; harmless when called twice."""
        if self._handle >= 0:
            with contextlib.suppress(OSError):
                self._file.unlink()
            os.close(self._handle)
            self._handle = -1
