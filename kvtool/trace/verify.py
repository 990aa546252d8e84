"""Verify: every byte of a trace against its commit file, every fault named."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtool.errors import KvtoolError
from kvtool.trace.commit import Entry, file_entry, read_commit
from kvtool.trace.layout import COMMIT
from kvtool.trace.metadata import list_files
from kvtool.trace.opening import mirror_of, refuse_incomplete
from kvtool.trace.remote import Mirror, is_address


@dataclass(frozen=True)
class Damage:
    """One file that is not what was written.

    Attributes:
        path: below the trace.
        what: `missing`, `truncated`, `altered` and so on, in words.
    """

    path: str
    what: str


@dataclass(frozen=True)
class ByteReport:
    """What the check of all bytes found.

    Attributes:
        files, total_bytes: how much was compared.
        damage: empty where all is sound.
    """

    files: int
    total_bytes: int
    damage: list[Damage]


def verify_bytes(
    path: str | os.PathLike[str], progress: Callable[[int, int, str], None] | None = None, *, online: bool = False
) -> ByteReport:
    """Compare every file with the commit file's length and SHA-256, and look for files it does not list.

    At an address every file is fetched, compared and dropped; what is not listed cannot be seen there.

    Raises:
        KvtoolError: where there is no published trace at all, or one of a newer format.
    """
    if (address := os.fspath(path)) and is_address(address):
        return _verify_remote(mirror_of(address, online), progress)
    root = Path(path)
    refuse_incomplete(root)
    damage: list[Damage] = []
    try:
        entries = dict(read_commit(root).entries)
    except KvtoolError as error:
        if error.code == "trace-format":
            raise
        damage.append(Damage(COMMIT, "damaged: it does not match its own digest, or is not what kvtool writes"))
        entries = _salvage(root)
    actual: dict[str, Entry] = {}
    for done, (name, entry) in enumerate(entries.items()):
        if progress is not None and done % 16 == 0:
            progress(done, len(entries), "files")
        file = root / name
        if any((root / folder).is_symlink() for folder in Path(name).parents if folder != Path(".")):
            damage.append(Damage(name, "reached through a symbolic link"))
        elif file.is_symlink() or (file.exists() and not file.is_file()):
            damage.append(Damage(name, "not a regular file"))
        elif not file.exists():
            damage.append(Damage(name, "missing"))
        else:
            found = file_entry(file)
            if found != entry:
                actual[name] = found
    owners = {entry: name for name, entry in entries.items()}
    for name, found in actual.items():
        damage.append(Damage(name, _difference(name, found, entries[name], owners)))
    damage.extend(Damage(name, "not listed in COMMIT.json") for name in list_files(root) if name not in entries)
    return ByteReport(len(entries), sum(entry.length for entry in entries.values()), damage)


def _verify_remote(mirror: Mirror, progress: Callable[[int, int, str], None] | None) -> ByteReport:
    with mirror.speaking():
        commit = read_commit(mirror.root)
    damage: list[Damage] = []
    for done, name in enumerate(commit.entries):
        if progress is not None:
            progress(done, len(commit.entries), "files")
        try:
            mirror.check(name, commit)
        except KvtoolError as error:
            if error.code != "trace-damaged":
                raise
            damage.append(Damage(name, error.message.partition(f": {name}: ")[2]))
    return ByteReport(len(commit.entries), commit.total_bytes, damage)


def _difference(name: str, found: Entry, expected: Entry, owners: dict[Entry, str]) -> str:
    owner = owners.get(found)
    if owner is not None and found.length:
        return f"swapped: holds what belongs to {owner}"
    if found.length < expected.length:
        return f"truncated: {found.length} of {expected.length} bytes"
    if found.length > expected.length:
        return f"{found.length - expected.length} bytes too long"
    return "edited or damaged metadata" if name.endswith("zarr.json") else "altered: its SHA-256 does not match"


def _salvage(root: Path) -> dict[str, Entry]:
    """What a damaged commit file still says, so that other faults can be named too."""
    try:
        values: Any = json.loads((root / COMMIT).read_bytes().decode("utf-8", errors="replace"))
        pairs = values["files"].items()
        entries = {str(name): Entry(int(pair[0]), str(pair[1])) for name, pair in pairs}
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError, OSError, OverflowError):
        entries = {}
    inside = {name: entry for name, entry in entries.items() if _is_inside(name)}
    return inside or {name: file_entry(root / name) for name in list_files(root) if (root / name).is_file()}


def _is_inside(name: str) -> bool:
    return (
        not name.startswith("/") and all(part not in ("", ".", "..") for part in name.split("/")) and "\0" not in name
    )


def damage_error(path: str | os.PathLike[str], report: ByteReport) -> KvtoolError:
    """One sentence about a report that found damage."""
    shown = "; ".join(f"{damage.path}: {damage.what}" for damage in report.damage[:5])
    more = f"; and {len(report.damage) - 5} more" if len(report.damage) > 5 else ""
    return KvtoolError(
        "trace-damaged",
        f"{path} is damaged: {shown}{more}",
        "fetch or capture the trace again; its numbers cannot be trusted",
    )
