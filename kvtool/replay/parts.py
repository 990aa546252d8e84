"""Parts: what a replay has finished so far, on disk, so that a stopped run resumes."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvtool.errors import KvtoolError
from kvtool.files import Lock, write_durably, writing
from kvtool.manifest import digest
from kvtool.result import FILES, WRITING, read_parquet, table_of, write_parquet

TABLES = ("layers", "rows", "ages", "evict_steps")  # of every part
# Of parts that were decomposed, whose trace names rows, under repeating schedules, with telemetry.
OPTIONAL = ("decomposition", "ladder", "landmarks", "events", "cache", "telemetry")
Partial = dict[str, dict[str, Tensor]]  # [metric][field]
WHOLE = "whole"
RUN = "run"  # file beside the parts: the digest of what they belong to


@dataclass
class Part:
    """The outcome of one (sequence, layer) with all its cells.

    Attributes:
        tables: those of `TABLES`, and of `OPTIONAL` where asked for, as lists of entries or Arrow tables.
        partials: what each metric stored, per cell.
        notes: what the user should know, as `kvtool.replay.notes` writes and reads them.
        spans: what each metric stored of the steps from one event to the next, per cell by the event's step.
        numbers: columns of cells, layers and rows that are float64 whatever they are called.
        kernels: which version of every operation ran, where a card was in use.
    """

    tables: dict[str, Any]
    partials: list[Partial]
    notes: list[dict[str, Any]] = field(default_factory=list)
    spans: list[dict[int, Partial]] = field(default_factory=list)
    numbers: tuple[str, ...] = ()
    kernels: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.spans = self.spans or [{} for _ in self.partials]


class Store:
    """Parts below `<output>/parts`, one folder per unit of work, published by one rename each.

    Args:
        output: folder of the result; created with the first part.
        force: a finished result that is there may be replaced.
        resumes: parts that are there may be gone on from. Without, they are another run's unfinished work, and
            stay unless `force`.

    Raises:
        KvtoolError: `output-exists`, `locked`, `file-missing`, `write-failed`.
    """

    def __init__(self, output: Path, force: bool, resumes: bool = True) -> None:
        self.output, self.folder = output, output / "parts"
        self._force, self._run = force, ""
        self._lock: Lock | None = None
        if output.exists() and not output.is_dir():
            raise KvtoolError("output-exists", f"{output} is a file, not a folder", "choose another -o")
        if (output / "manifest.json").exists():
            if not force:
                raise KvtoolError(
                    "output-exists", f"{output} already holds a result", "choose another -o, or add --force"
                )
        elif output.is_dir() and not {entry.name for entry in output.iterdir()} <= {*FILES, WRITING, "parts"}:
            raise KvtoolError("output-exists", f"{output} is not empty and holds no kvtool result", "choose another -o")
        if not resumes and not force and self.folder.is_dir():
            raise KvtoolError(
                "output-exists",
                f"{output} holds the unfinished work of kvtool replay",
                "choose another -o, finish that run, or add --force to drop it",
            )

    @classmethod
    def of_worker(cls, output: Path, run: str) -> Store:
        """The parts of a run that another process has opened and watches over: nothing is checked or locked here.

        Args:
            run: digest of the run.
        """
        store = cls.__new__(cls)
        store.output, store.folder, store._force, store._run, store._lock = output, output / "parts", False, run, None
        return store

    def expect_run(self) -> None:
        """Complain where the folder does not hold the parts of this very run: seen through another mount, or dropped.

        Raises:
            KvtoolError: code `worker-differs`.
        """
        try:
            seen = (self.folder / RUN).read_text()
        except OSError:
            seen = ""
        if seen != self._run:
            raise KvtoolError(
                "worker-differs",
                f"a worker on {os.uname().nodename} does not find this run in the folder {self.output}",
                "-o must be one folder that all workers see under the same path",
            )

    def announce(self) -> None:
        """Write down whose parts these are before the first one is there: workers ask.

        Raises:
            KvtoolError: code `disk-full` or `write-failed`.
        """
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            write_durably(self.folder / RUN, self._run.encode())

    def sweep(self, process: int | str) -> None:
        """Remove what a process that was stopped in the middle of writing a part has left."""
        for half in self.folder.glob(f".*.{process}"):
            shutil.rmtree(half, ignore_errors=True)

    def open(self, run: Any) -> None:
        """Take the place for this run. Separate from the checks, so that bad input leaves nothing behind.

        Args:
            run: all that decides what the parts hold, as JSON values; parts of another run are not dropped unasked.

        Raises:
            KvtoolError: `file-missing`, `locked`, `write-failed`, or `output-exists` for parts of another run.
        """
        if not self.output.parent.is_dir():
            raise KvtoolError("file-missing", f"the folder {self.output.parent} does not exist", "create it first")
        self._run = digest(run)
        with writing(self.output):
            self._lock = Lock(self.output)
        if not self._holds_others():
            return
        if self._force:
            shutil.rmtree(self.folder)
            return
        self.close(finished=False)
        raise KvtoolError(
            "output-exists",
            f"{self.output} holds the unfinished work of a run with other options, another trace or other versions",
            "choose another -o, finish that run, or add --force to drop it",
        )

    def _holds_others(self) -> bool:
        """Whether there are finished parts that do not belong to this run."""
        if not self.folder.is_dir() or not any(entry.is_dir() for entry in self.folder.iterdir()):
            return False
        try:
            return (self.folder / RUN).read_text() != self._run
        except OSError:
            return True

    def _path(self, name: str, key: str) -> Path:
        return self.folder / f"{name}-{key[:24]}"

    def load(self, name: str, key: str) -> Part | None:
        """The part of that name and key; None where it was not finished or is not what was written.

        A damaged part is worth nothing and costs a few seconds: it is computed again.
        """
        path = self._path(name, key)
        try:
            sealed = json.loads((path / "part.json").read_text())
            names = [*TABLES, *(name for name in OPTIONAL if f"{name}.parquet" in sealed["files"])]
            files = {file: (path / file).read_bytes() for file in (*(f"{n}.parquet" for n in names), "partials.npz")}
            sound = sealed["files"] == {file: hashlib.sha256(raw).hexdigest() for file, raw in files.items()}
        except (OSError, ValueError, KeyError, TypeError):
            sound = False
        if not sound:
            shutil.rmtree(path, ignore_errors=True)
            return None
        partials: list[Partial] = []
        spans: list[dict[int, Partial]] = []
        with np.load(path / "partials.npz", allow_pickle=False) as archive:
            for entry in archive.files:
                cell, span, metric, name_of_field = entry.split("/")
                while len(partials) <= int(cell):
                    partials.append({})
                    spans.append({})
                into = partials[int(cell)] if span == WHOLE else spans[int(cell)].setdefault(int(span), {})
                into.setdefault(metric, {})[name_of_field] = torch.from_numpy(archive[entry])
        tables = {table: read_parquet(path / f"{table}.parquet") for table in names}
        return Part(tables, partials, sealed["notes"], spans, kernels=sealed.get("kernels", {}))

    def save(self, name: str, key: str, part: Part) -> None:
        """Publish a finished part.

        Raises:
            KvtoolError: code `disk-full` or `write-failed`.
        """
        path = self._path(name, key)
        temporary = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}")
        try:
            with writing(path):
                temporary.mkdir(parents=True, exist_ok=True)
                if not (self.folder / RUN).exists():
                    write_durably(self.folder / RUN, self._run.encode())
                digests = {}
                for table, entries in part.tables.items():
                    file = f"{table}.parquet"
                    digests[file] = write_parquet(_arrow(table, entries, part.numbers), temporary / file)
                buffer = io.BytesIO()
                arrays = {
                    f"{cell}/{span}/{metric}/{name}": value.numpy()
                    for cell, whole in enumerate(part.partials)
                    for span, metrics in [(WHOLE, whole), *part.spans[cell].items()]
                    for metric, fields in metrics.items()
                    for name, value in fields.items()
                }
                np.savez(buffer, **arrays)  # type: ignore[arg-type]
                digests["partials.npz"] = hashlib.sha256(buffer.getvalue()).hexdigest()
                write_durably(temporary / "partials.npz", buffer.getvalue())
                sealed = {"files": digests, "notes": part.notes, "kernels": part.kernels}
                write_durably(temporary / "part.json", json.dumps(sealed).encode())
                try:
                    os.rename(temporary, path)
                except OSError as error:  # another worker was given the same unit and was first: its part is the same
                    if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                        raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def close(self, finished: bool, resumable: bool = True) -> None:
        """Let others write here; the parts are no longer needed once the whole result is written, or where no
        run can go on from them. A folder that then holds nothing goes too."""
        if (finished or not resumable) and self.folder.is_dir():
            shutil.rmtree(self.folder)
        if not finished and not resumable and self.output.is_dir() and not any(self.output.iterdir()):
            self.output.rmdir()
        if self._lock is not None:
            self._lock.release()
            self._lock = None


def _arrow(name: str, entries: Any, numbers: tuple[str, ...]) -> Any:
    """Entries, or a table that was made of them already, as an Arrow table."""
    return table_of(name, entries, numbers) if isinstance(entries, list) else entries
