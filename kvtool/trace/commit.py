"""Commit file: the list of every file of a trace with length and SHA-256, sealed by a SHA-256.

The digest in the last field covers everything before it, so it names the trace's very content.
A crc32c would not do here: chunks end in their own crc32c, and the crc32c of any such file is the
same constant (0x48674BC7), so two swapped chunks would look alike.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtool.errors import KvtoolError
from kvtool.trace.layout import COMMIT, FORMAT

MOST_COMMIT_BYTES = 256 << 20
MOST_DEPTH = 32

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_SEAL = re.compile(rb',"sha256":"([0-9a-f]{64})"\}\n\Z')
_HEX = re.compile(r"[0-9a-f]{64}\Z")
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*\Z")


@dataclass(frozen=True)
class Entry:
    """What the commit file says about one file."""

    length: int
    sha256: str


@dataclass(frozen=True)
class Commit:
    """A commit file that was read and found consistent.

    Attributes:
        entries: path below the trace, with forward slashes -> Entry.
        digest: the trace digest, 64 hex digits.
    """

    entries: Mapping[str, Entry]
    digest: str

    @property
    def total_bytes(self) -> int:
        """Bytes of all listed files."""
        return sum(entry.length for entry in self.entries.values())


def parse_json(raw: bytes, where: str) -> Any:
    """JSON from an untrusted file: no duplicate keys, no NaN, nested no deeper than 32.

    Raises:
        KvtoolError: code `trace-unsafe`.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) != len(pairs):
            raise ValueError("a key appears twice")
        return values

    def constant(name: str) -> Any:
        raise ValueError(f"{name} is not JSON")

    try:
        text = raw.decode("utf-8")
        depth = 0
        for bracket in re.findall(r"[\[{\]}]", _STRING.sub("", text)):
            depth += 1 if bracket in "[{" else -1
            if depth > MOST_DEPTH:
                raise ValueError(f"nested deeper than {MOST_DEPTH}")
        return json.loads(text, object_pairs_hook=unique, parse_constant=constant)
    except (ValueError, RecursionError) as error:
        raise KvtoolError("trace-unsafe", f"{where} is not sound JSON: {error}") from None


def file_entry(path: Path) -> Entry:
    """Length and SHA-256 of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return Entry(file.tell(), digest)


def seal(entries: Mapping[str, Entry]) -> tuple[bytes, str]:
    """The bytes of a commit file, and the digest it ends in."""
    files = {path: [entry.length, entry.sha256] for path, entry in entries.items()}
    body = json.dumps({"files": files, "format": FORMAT}, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    head = body[:-1].encode()
    digest = hashlib.sha256(head).hexdigest()
    return head + f',"sha256":"{digest}"}}\n'.encode(), digest


def read_commit(path: Path) -> Commit:
    """The commit file of the trace at `path`.

    Raises:
        KvtoolError: code `trace-damaged` when a single bit is off, `trace-unsafe` when it names files
            outside the trace, `trace-format` when a newer kvtool wrote it.
    """
    file = path / COMMIT
    if file.is_symlink() or not file.is_file():
        raise KvtoolError("trace-unsafe", f"{file} is not a regular file")
    if file.stat().st_size > MOST_COMMIT_BYTES:
        raise KvtoolError("trace-unsafe", f"{file} has {file.stat().st_size} bytes, more than a commit file may have")
    raw = file.read_bytes()
    damaged = KvtoolError("trace-damaged", f"{file} is damaged: it does not match its own digest", _AGAIN)
    sealed = _SEAL.search(raw)
    if sealed is None or hashlib.sha256(raw[: sealed.start()]).hexdigest().encode() != sealed[1]:
        raise damaged
    values = parse_json(raw, str(file))
    refuse_newer(values.get("format"), path)
    files = values.get("files")
    if set(values) != {"files", "format", "sha256"} or not isinstance(files, dict):
        raise KvtoolError("trace-unsafe", f"{file} does not have the fields files, format and sha256 alone")
    entries = dict(_entries(files, file))
    if seal(entries)[0] != raw:
        raise KvtoolError("trace-unsafe", f"{file} is not in canonical form")
    return Commit(entries, sealed[1].decode())


_AGAIN = "kvtool inspect --verify names every damaged file; fetch or capture the trace again"


def refuse_newer(written: Any, path: Path) -> None:
    """Complain when `written`, a format number, is not one that this version reads."""
    if isinstance(written, bool) or not isinstance(written, int) or written < 1:
        raise KvtoolError("trace-unsafe", f"{path} states no format number")
    if written > FORMAT:
        raise KvtoolError(
            "trace-format",
            f"{path} was written by format {written}, this version reads up to {FORMAT}",
            "install a newer kvtool",
        )


def _entries(files: Mapping[str, Any], file: Path) -> Iterator[tuple[str, Entry]]:
    for name, pair in files.items():
        parts = name.split("/")
        if len(name) > 200 or not all(_PART.match(part) for part in parts) or name == COMMIT:
            raise KvtoolError("trace-unsafe", f"{file} lists {name[:80]!r}, which is no path inside a trace")
        sound = isinstance(pair, list) and len(pair) == 2 and type(pair[0]) is int and pair[0] >= 0
        if not sound or not isinstance(pair[1], str) or not _HEX.match(pair[1]):
            raise KvtoolError("trace-unsafe", f"{file} does not give length and SHA-256 of {name}")
        yield name, Entry(*pair)
