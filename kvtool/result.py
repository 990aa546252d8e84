"""Result: tidy Arrow tables plus a manifest, the one input of every table, diff, check and report."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from kvtool.errors import KvtoolError
from kvtool.files import fsync_folder, write_durably, writing
from kvtool.manifest import digest
from kvtool.result_columns import COUNTS, KEY, KINDS, OWN, PLACE

SCHEMA, LIVE, ABLATE = "kvtool.replay/1", "kvtool.live/1", "kvtool.ablate/1"
TABLES = ("cells", "layers", "rows", "ages", "evict_steps")
# Only where they were asked for, where a trace names rows, or where a schedule repeats.
OPTIONAL = ("token_shares", "decomposition", "ladder", "landmarks", "timeline", "events", "cache", "telemetry")
MEASURED = ("cells", "layers", "rows")  # where the columns of metrics stand
PARQUET_ONLY = ("evict_steps", "cache")  # long lists, left out of the JSON document
# What a result of each kind holds.
SCHEMAS = {
    SCHEMA: TABLES,
    LIVE: ("cells", "layers", "rows", "steps", "spans", "calibration", "evict_steps"),
    ABLATE: ("cells", "effects", "interactions"),
}

_PLAIN = {type(None), bool, int, str}
WRITING = ".writing"  # folder of a result that is being written
# Every file that a result may leave, manifest.json apart.
FILES = {f"{name}.parquet" for names in (*SCHEMAS.values(), OPTIONAL) for name in names}


def _arrow(kind: str) -> pa.DataType:
    """The Arrow type that a word of kvtool.result_columns means."""
    one = kind.removeprefix("list of ")
    found = pa.type_for_alias(one)
    return found if one == kind else pa.list_(found)


def _kind(name: str, values: list[Any], numbers: Collection[str]) -> pa.DataType | None:
    """The type of a column, from its name first: it must not depend on which layers or policies ran."""
    if name in numbers:
        return pa.float64()
    if name in KINDS:
        return _arrow(KINDS[name])
    if name.endswith(("_histogram", "_at_risk")):
        return pa.list_(pa.int32())
    if name.startswith("survival_"):
        return pa.list_(pa.float64())
    if name.endswith(("_tokens", "_age_min", "_age_max")):
        return pa.int64()
    if all(_is_number(kind) for kind in {type(value) for value in values}):
        return pa.float64()
    return None


def _is_number(kind: type) -> bool:
    """Whether values of this type are numbers, or None."""
    return kind is type(None) or (issubclass(kind, int | float) and not issubclass(kind, bool))


def _column(entries: list[Mapping[str, Any]], name: str) -> list[Any]:
    """What the entries say of one column, in plain values; tables are long, and most values are plain already."""
    values = [entry.get(name) for entry in entries]
    kinds = {type(value) for value in values}
    if kinds <= _PLAIN:
        return values
    if kinds <= {*_PLAIN, float}:
        return [value if type(value) is not float or math.isfinite(value) else None for value in values]
    return [_plain(value) for value in values]


def _plain(value: Any) -> Any:
    """`value` without NaN and infinities, which are null in every output."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, list) and value and isinstance(value[0], float):
        return [None if isinstance(v, float) and not math.isfinite(v) else v for v in value]
    return value


def table_of(name: str, entries: Iterable[Mapping[str, Any]], numbers: Collection[str] = ()) -> pa.Table:
    """Entries as the Arrow table `name`: key and place columns typed, the others as their values say.

    Args:
        numbers: columns of cells, layers and rows that are float64 whatever they are called.
    """
    numbers = numbers if name in MEASURED else ()  # elsewhere the name is another column's
    entries = list(entries)
    fixed = OWN[name] if name in OWN else {**KEY, **PLACE[name]}
    others = list(dict.fromkeys(key for entry in entries for key in entry if key not in fixed))
    columns: dict[str, pa.Array] = {
        key: pa.array(_column(entries, key), type=_arrow(kind)) for key, kind in fixed.items()
    }
    for key in others:
        values = _column(entries, key)
        if key in numbers:  # Arrow refuses whole numbers that float64 rounds
            values = [None if value is None else float(value) for value in values]
        columns[key] = pa.array(values, type=_kind(key, values, numbers))
    return pa.table(columns)


def with_columns(table: pa.Table, columns: Mapping[str, list[float | None]]) -> pa.Table:
    """`table` with further columns of numbers, one value a row."""
    for name, values in columns.items():
        table = table.append_column(name, pa.array(values, type=pa.float64()))
    return table


@dataclass
class Result:
    """What a replay or a live run found.

    Attributes:
        manifest: everything needed to run it again.
        tables: the Arrow tables that SCHEMAS lists, by name; `token_shares` where they were asked for.
        warnings: sentences the user should read.
        schema: which kind of result this is.
    """

    manifest: dict[str, Any]
    tables: dict[str, pa.Table]
    warnings: list[str] = field(default_factory=list)
    schema: str = SCHEMA

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
        """The one JSON document that `--json` prints (everything but the arrays per step or token)."""
        return {
            "schema": self.schema,
            "manifest": self.manifest,
            **{name: self.entries(name) for name in _names(self.schema, self.tables) if name not in PARQUET_ONLY},
            "warnings": self.warnings,
        }

    def save(self, path: str | Path) -> None:
        """Write the tables as Parquet and, last, manifest.json: a folder without it is unfinished.

        Raises:
            KvtoolError: code `disk-full` or `write-failed`.
        """
        folder = Path(path)
        document: dict[str, Any] = {"schema": self.schema, "manifest": self.manifest, "warnings": self.warnings}
        with writing(folder), _prepared(folder) as prepared:
            document["files"] = {
                name: write_parquet(table, prepared / f"{name}.parquet") for name, table in self.tables.items()
            }
            document["digest"] = digest(document)
            write_durably(prepared / "manifest.json", json.dumps(document, indent=1, allow_nan=False).encode() + b"\n")
            # Never an old manifest beside new tables, nor old tables beside a new manifest.
            (folder / "manifest.json").unlink(missing_ok=True)
            for file in FILES - {f"{name}.parquet" for name in self.tables}:
                (folder / file).unlink(missing_ok=True)
            for name in self.tables:
                (prepared / f"{name}.parquet").rename(folder / f"{name}.parquet")
            (prepared / "manifest.json").rename(folder / "manifest.json")
            fsync_folder(folder)

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
            if document["schema"] not in SCHEMAS:
                known = " or ".join(SCHEMAS)
                raise KvtoolError("result-damaged", f"{folder} is a {document['schema']}, expected {known}")
            if document.pop("digest") != digest(document):
                raise KvtoolError("result-damaged", f"{manifest} was altered", "replay again")
            names = _names(document["schema"], document["files"])
            for name in names:
                file = folder / f"{name}.parquet"
                if hashlib.sha256(file.read_bytes()).hexdigest() != document["files"][name]:
                    raise KvtoolError("result-damaged", f"{file} was altered", "replay again")
            tables = {name: read_parquet(folder / f"{name}.parquet") for name in names}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise KvtoolError("result-damaged", f"{folder} cannot be read as a result: {error}") from error
        return cls(document["manifest"], tables, document["warnings"], document["schema"])


@contextlib.contextmanager
def _prepared(folder: Path) -> Iterator[Path]:
    """A folder inside `folder` where everything is written before any of it counts; gone afterwards, and `folder`
    with it where it holds nothing else."""
    prepared = folder / WRITING
    shutil.rmtree(prepared, ignore_errors=True)
    prepared.mkdir(parents=True)
    try:
        yield prepared
    finally:
        shutil.rmtree(prepared, ignore_errors=True)
        if not any(folder.iterdir()):
            folder.rmdir()


def _names(schema: str, there: Iterable[str]) -> list[str]:
    """The tables of a result of this kind that has `there`."""
    there = set(there)
    return [*SCHEMAS[schema], *(name for name in OPTIONAL if name in there)]


def _canonical(table: pa.Table) -> pa.Table:
    """The same table in one spelling: how it was put together, at once or from finished parts, must not show in
    its bytes. Parquet renames the entries of lists, and appending makes chunks."""
    kinds = [pa.list_(kind.value_type) if pa.types.is_list(kind) else kind for kind in table.schema.types]
    named = zip(table.column_names, kinds, strict=True)
    return table.replace_schema_metadata(None).cast(pa.schema(list(named))).combine_chunks()


def write_parquet(table: pa.Table, path: Path) -> str:
    """Write through a buffer and a temporary name, so that a file that exists is whole; returns its SHA-256."""
    buffer = pa.BufferOutputStream()
    pq.write_table(_canonical(table), buffer, compression="zstd", write_page_checksum=True)
    raw = buffer.getvalue().to_pybytes()
    write_durably(path, raw)
    return hashlib.sha256(raw).hexdigest()


def read_parquet(path: Path) -> pa.Table:
    """The table, every page held against its checksum."""
    return pq.read_table(path, page_checksum_verification=True)


def concatenate(tables: list[pa.Table]) -> pa.Table:
    """Tables of one name below each other; a column that one lacks (or has only nulls in) is null there."""
    return pa.concat_tables(tables, promote_options="permissive")
