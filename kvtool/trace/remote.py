"""Remote: a trace at an address that fsspec knows, read through a folder here that holds what was asked for.

Only files that are needed come over, each whole, and each is held against length and SHA-256 of the commit file before
anything reads it; then the reader works on them as on any trace. Metadata stays; of chunks the folder keeps the newest
`KEPT_BYTES` (and whatever one array needs at once), so that disk space stays constant.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kvtool.errors import KvtoolError
from kvtool.scratch import Scratch
from kvtool.trace.commit import MOST_COMMIT_BYTES, Commit, Entry
from kvtool.trace.layout import COMMIT

KEPT_BYTES = 4 << 30
TRIES = 3
AT_ONCE = 8  # files
_PIECE = 1 << 20
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]*://")


def is_address(text: str) -> bool:
    """Whether `text` is an address such as s3://bucket/run.zarr, not a path."""
    return _ADDRESS.match(text) is not None


class Mirror:
    """The folder here of a trace elsewhere.

    Args:
        address: of the trace.

    Attributes:
        root: the folder; it goes with this object.

    Raises:
        KvtoolError: `package-missing`, `usage` for a protocol that fsspec does not know; `file-missing` where there is
            no trace, or nobody answers.
    """

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        self._files, self._base = _filesystem(self.address)
        scratch = Scratch("mirror")
        self.root = scratch.path
        self._finalizer = weakref.finalize(self, scratch.remove)
        self._kept: dict[str, int] = {}  # chunk -> bytes, the one that was asked for longest ago first
        self._commit: Commit | None = None
        self._lock = threading.Lock()
        self._fetch(COMMIT, None)

    @contextlib.contextmanager
    def speaking(self) -> Iterator[None]:
        """Errors inside name the address instead of the folder."""
        try:
            yield
        except KvtoolError as error:
            message = error.message.replace(str(self.root), self.address)
            raise KvtoolError(error.code, message, error.hint) from error.__cause__

    def admit(self, commit: Commit, most_bytes: int) -> None:
        """Fetch the metadata that a commit file lists.

        Args:
            most_bytes: no file of metadata may be larger; one that is stays away, and its reader complains.

        Raises:
            KvtoolError: `trace-damaged`, `file-missing`.
        """
        self._commit = commit
        names = [name for name in commit.entries if name == "zarr.json" or name.endswith("/zarr.json")]
        self._fetch_all([name for name in names if commit.entries[name].length <= most_bytes])

    def need(self, names: list[str]) -> None:
        """Have these chunks in the folder.

        Raises:
            KvtoolError: `trace-damaged`, `file-missing`.
        """
        assert self._commit is not None
        with self._lock:
            lacking = [name for name in names if name not in self._kept]
            self._drop(sum(self._commit.entries[name].length for name in lacking), set(names))
            self._fetch_all(lacking)
            for name in names:
                self._kept.pop(name, None)
                self._kept[name] = self._commit.entries[name].length

    def check(self, name: str, commit: Commit) -> None:
        """Fetch a file, to see that it is what was written, and keep it no longer.

        Raises:
            KvtoolError: `trace-damaged`, `file-missing`.
        """
        self._fetch(name, commit.entries[name])
        (self.root / name).unlink()

    def _drop(self, coming: int, but: set[str]) -> None:
        """Make room."""
        held = sum(self._kept.values())
        for name in list(self._kept):
            if held + coming <= KEPT_BYTES:
                return
            if name not in but:
                held -= self._kept.pop(name)
                (self.root / name).unlink(missing_ok=True)

    def _fetch_all(self, names: list[str]) -> None:
        assert self._commit is not None
        entries = self._commit.entries
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for _ in pool.map(lambda name: self._fetch(name, entries[name]), names):
                pass

    def _fetch(self, name: str, expected: Entry | None) -> None:
        """A file, whole and as the commit file says, or an error; the commit file itself is checked by its reader."""
        for attempt in range(TRIES):
            try:
                return self._copy(name, expected)
            except KvtoolError:
                raise
            except Exception as error:  # every filesystem of fsspec has exceptions of its own
                if _tells_absence(error):
                    raise self._absent(name, expected) from None
                if attempt + 1 == TRIES:
                    words = " ".join(f"{error.__cause__ or error}".split())[:200]
                    raise KvtoolError(
                        "file-missing",
                        f"{self.address}: {name} cannot be fetched: {type(error).__name__}: {words}",
                        "check address, network and credentials; nothing that was read so far is wrong",
                    ) from error
                time.sleep(0.5 * 2**attempt)
        raise AssertionError("every try returns or raises")

    def _absent(self, name: str, expected: Entry | None) -> KvtoolError:
        if expected is not None:
            return self._damaged(name, "is missing")
        said = f"{self.address} holds no kvtool trace: there is no {COMMIT}"
        return KvtoolError("file-missing", said, "check the address")

    def _copy(self, name: str, expected: Entry | None) -> None:
        most = MOST_COMMIT_BYTES if expected is None else expected.length
        place, digest, length = self.root / name, hashlib.sha256(), 0
        place.parent.mkdir(parents=True, exist_ok=True)
        half = place.with_name(f"{place.name}.half")
        try:
            with self._files.open(f"{self._base}/{name}", "rb") as source, half.open("wb") as target:
                # One byte more than there should be tells a file that is too long from one that ends.
                while length <= most and (piece := source.read(min(_PIECE, most + 1 - length))):
                    target.write(piece)
                    digest.update(piece)
                    length += len(piece)
            if expected is not None and length != expected.length:
                more = "more than " if length > expected.length else ""
                raise self._damaged(name, f"has {more}{min(length, expected.length)} bytes, expected {expected.length}")
            if expected is not None and digest.hexdigest() != expected.sha256:
                raise self._damaged(name, "its SHA-256 does not match")
            half.rename(place)
        finally:
            half.unlink(missing_ok=True)

    def _damaged(self, name: str, what: str) -> KvtoolError:
        return KvtoolError("trace-damaged", f"{self.address} is damaged: {name}: {what}", "write or upload it again")


def _tells_absence(error: Exception) -> bool:
    """Whether a filesystem says that a file is not there; over HTTP it says so too where nobody answers at all."""
    if not isinstance(error, FileNotFoundError):
        return False
    cause = error.__cause__
    return cause is None or isinstance(cause, FileNotFoundError | KeyError) or getattr(cause, "status", 0) in (404, 410)


def _filesystem(address: str) -> tuple[Any, str]:
    """(filesystem, path in it) of an address.

    Raises:
        KvtoolError: `package-missing`, `usage`.
    """
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise KvtoolError(
            "package-missing", f"{address} needs the package fsspec", "pip install 'kvtool[remote]'"
        ) from None
    try:
        files, path = url_to_fs(address)
    except ImportError as error:
        words = " ".join(str(error).split())
        raise KvtoolError("package-missing", f"{address} needs another package: {words}", "install it") from None
    except Exception as error:
        words = " ".join(str(error).split())
        raise KvtoolError(
            "usage", f"{address} cannot be read: {words}", "file, http, https, s3, gs and so on"
        ) from None
    return files, str(path).rstrip("/")
