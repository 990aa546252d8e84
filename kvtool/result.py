"""Result: tidy Arrow tables plus a manifest, the one input of every table, diff, check and report."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from kvtool.errors import KvtoolError
from kvtool.files import write_durably, writing
from kvtool.manifest import digest

SCHEMA = "kvtool.replay/1"
TABLES = ("cells", "layers", "rows", "ages", "evict_steps")

# The columns that name an entry. They come first in every table, in this order.
KEY = {
    "sequence": pa.int32(),
    "policy": pa.string(),
    "ratio": pa.float64(),
    "budget": pa.int32(),
    "achieved": pa.float64(),
    "schedule": pa.string(),
    "evaluate": pa.string(),
    "event": pa.int32(),
}
PLACE = {
    "cells": {},
    "layers": {"layer": pa.int32()},
    "rows": {"layer": pa.int32(), "kv_head": pa.int32(), "q_head": pa.int32()},
    "ages": {"layer": pa.int32(), "kv_head": pa.int32()},
    "evict_steps": {"layer": pa.int32(), "kv_head": pa.int32()},
}
# Columns that count something: whole numbers per entry; means of them over layers or sequences need not be.
COUNTS = ("achieved", "candidates", "ties", "undefined_heads", "undefined_layers", "undefined_steps")


def _kind(name: str, values: list[Any]) -> pa.DataType:
    """The type of a column, from its name first: it must not depend on which layers or policies ran."""
    if name == "evict_step" or name.endswith(("_histogram", "_at_risk")):
        return pa.list_(pa.int32())
    if name.startswith("survival_"):
        return pa.list_(pa.float64())
    if name in ("oracle", "frozen"):
        return pa.bool_()
    if name == "undefined_steps" or name.endswith(("_tokens", "_age_min", "_age_max")):
        return pa.int64()
    if any(isinstance(value, str) for value in values):
        return pa.string()
    return pa.float64()


def _plain(value: Any) -> Any:
    """`value` without NaN and infinities, which are null in every output."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, list) and value and isinstance(value[0], float):
        return [_plain(v) for v in value]
    return value


def table_of(name: str, entries: Iterable[Mapping[str, Any]]) -> pa.Table:
    """Entries as the Arrow table `name`: key and place columns typed, the others as their values say."""
    entries = [{key: _plain(value) for key, value in entry.items()} for entry in entries]
    fixed = {**KEY, **PLACE[name]}
    others = list(dict.fromkeys(key for entry in entries for key in entry if key not in fixed))
    columns: dict[str, pa.Array] = {
        key: pa.array([entry.get(key) for entry in entries], type=kind) for key, kind in fixed.items()
    }
    for key in others:
        values = [entry.get(key) for entry in entries]
        columns[key] = pa.array(values, type=_kind(key, values))
    return pa.table(columns)


@dataclass
class Result:
    """What a replay found.

    Attributes:
        manifest: everything needed to run it again.
        tables: `cells`, `layers`, `rows`, `ages` and `evict_steps` as Arrow tables.
        warnings: sentences the user should read.
    """

    manifest: dict[str, Any]
    tables: dict[str, pa.Table]
    warnings: list[str] = field(default_factory=list)

    def entries(self, name: str) -> list[dict[str, Any]]:
        """The table `name` as dictionaries; counts that are whole come as integers."""
        found: list[dict[str, Any]] = self.tables[name].to_pylist()
        counts = [column for column in COUNTS if column in self.tables[name].column_names]
        for entry in found:
            for column in counts:
                if isinstance(entry[column], float) and entry[column].is_integer():
                    entry[column] = int(entry[column])
        return found

    def document(self) -> dict[str, Any]:
        """The one JSON document that `--json` prints (everything but the evict_step arrays)."""
        return {
            "schema": SCHEMA,
            "manifest": self.manifest,
            **{name: self.entries(name) for name in ("cells", "layers", "rows", "ages")},
            "warnings": self.warnings,
        }

    def save(self, path: str | Path) -> None:
        """Write the tables as Parquet and, last, manifest.json: a folder without it is unfinished.

        Raises:
            KvtoolError: code `disk-full` or `write-failed`.
        """
        folder = Path(path)
        document: dict[str, Any] = {"schema": SCHEMA, "manifest": self.manifest, "warnings": self.warnings, "files": {}}
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "manifest.json").unlink(missing_ok=True)  # never an old manifest beside new tables
            for name, table in self.tables.items():
                document["files"][name] = write_parquet(table, folder / f"{name}.parquet")
            document["digest"] = digest(document)
            write_durably(folder / "manifest.json", json.dumps(document, indent=1, allow_nan=False).encode() + b"\n")

    @classmethod
    def load(cls, path: str | Path) -> Result:
        """Read a folder that `save` wrote.

        Raises:
            KvtoolError: `file-missing` for no or an unfinished result, `result-damaged` for an altered one.
        """
        folder = Path(path)
        manifest = folder / "manifest.json"
        if not manifest.is_file():
            raise KvtoolError(
                "file-missing",
                f"{folder} holds no finished result (no manifest.json)",
                "run the same kvtool replay again: it resumes where it stopped" if folder.is_dir() else None,
            )
        try:
            document = json.loads(manifest.read_text())
            if document["schema"] != SCHEMA:
                raise KvtoolError("result-damaged", f"{folder} is a {document['schema']}, expected {SCHEMA}")
            if document.pop("digest") != digest(document):
                raise KvtoolError("result-damaged", f"{manifest} was altered", "replay again")
            for name in TABLES:
                file = folder / f"{name}.parquet"
                if hashlib.sha256(file.read_bytes()).hexdigest() != document["files"][name]:
                    raise KvtoolError("result-damaged", f"{file} was altered", "replay again")
            tables = {name: read_parquet(folder / f"{name}.parquet") for name in TABLES}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise KvtoolError("result-damaged", f"{folder} cannot be read as a result: {error}") from error
        return cls(document["manifest"], tables, document["warnings"])


def write_parquet(table: pa.Table, path: Path) -> str:
    """Write through a buffer and a temporary name, so that a file that exists is whole; returns its SHA-256."""
    buffer = pa.BufferOutputStream()
    pq.write_table(table, buffer, compression="zstd", write_page_checksum=True)
    raw = buffer.getvalue().to_pybytes()
    write_durably(path, raw)
    return hashlib.sha256(raw).hexdigest()


def read_parquet(path: Path) -> pa.Table:
    """The table, every page held against its checksum."""
    return pq.read_table(path, page_checksum_verification=True)


def concatenate(tables: list[pa.Table]) -> pa.Table:
    """Tables of one name below each other; a column that one lacks (or has only nulls in) is null there."""
    return pa.concat_tables(tables, promote_options="permissive")
