"""Result: tidy Arrow tables plus a manifest, the one input of every table, diff, check and report."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from kvtool.errors import KvtoolError
from kvtool.files import fsync_folder, write_durably, writing
from kvtool.manifest import digest

SCHEMA, LIVE, ABLATE = "kvtool.replay/1", "kvtool.live/1", "kvtool.ablate/1"
TABLES = ("cells", "layers", "rows", "ages", "evict_steps")
# Only where they were asked for, or where a schedule repeats.
OPTIONAL = ("token_shares", "decomposition", "ladder", "timeline", "events", "cache", "telemetry")
PARQUET_ONLY = ("evict_steps", "cache")  # long lists, left out of the JSON document
# What a result of each kind holds.
SCHEMAS = {
    SCHEMA: TABLES,
    LIVE: ("cells", "layers", "rows", "steps", "calibration", "evict_steps"),
    ABLATE: ("cells", "effects", "interactions"),
}

WRITING = ".writing"  # folder of a result that is being written
# Every file that a result may leave, manifest.json apart.
FILES = {f"{name}.parquet" for names in (*SCHEMAS.values(), OPTIONAL) for name in names}

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
    "token_shares": {"layer": pa.int32(), "kv_head": pa.int32()},
    "decomposition": {"layer": pa.int32(), "kv_head": pa.int32(), "q_head": pa.int32()},
    "ladder": {"layer": pa.int32(), "kv_head": pa.int32()},
    "steps": {"step": pa.int32()},
    # These have all their columns here: there may be no event, and the columns stay.
    "timeline": {
        **dict.fromkeys(("layer", "step_from", "step_to"), pa.int32()),
        **dict.fromkeys(("layer_error", "mean_layer_error", "output_error", "evicted_mass"), pa.float64()),
        **dict.fromkeys(("mean_cache_tokens", "peak_cache_tokens", "predicted_kl"), pa.float64()),
        "predicted_kl_steps": pa.int64(),
    },
    "events": {
        "layer": pa.int32(),
        **{f"{noun}_{end}": pa.int64() for noun in ("candidates", "allowed", "achieved") for end in ("min", "max")},
        **dict.fromkeys(("evicted", "protected_tokens"), pa.int64()),
        "overfull": pa.bool_(),
        "ties": pa.int64(),
        "margin": pa.float64(),
        **dict.fromkeys(("factorisation_fallbacks", "deadline_fallbacks"), pa.int64()),
        **dict.fromkeys(("layer_error", "output_error"), pa.float64()),
        **dict.fromkeys(("cache_before", "cache_after"), pa.int64()),
        "attention_entropy": pa.float64(),
        **dict.fromkeys(("page_tokens", "pages_freed", "pages_held"), pa.int64()),
        "fragmentation": pa.float64(),
        "compaction_bytes": pa.int64(),
    },
    "cache": {
        **dict.fromkeys(("layer", "kv_head"), pa.int32()),
        **dict.fromkeys(("steps", "cache_tokens"), pa.list_(pa.int32())),
    },
    "telemetry": {
        "layer": pa.int32(),
        **{f"{stage}_ms": pa.float64() for stage in ("scoring", "factorisation", "selection", "compaction", "eviction")},
        "peak_temporary_bytes": pa.int64(),
    },
}
# The tables whose entries speak of no single cell: all their columns.
OWN = {
    "calibration": {
        "sequence": pa.int32(),
        "measured": pa.string(),
        "predictor": pa.string(),
        "cells": pa.int32(),
        "spearman": pa.float64(),
        "log_pearson": pa.float64(),
        "ratio_median": pa.float64(),
        "ratio_low": pa.float64(),
        "ratio_high": pa.float64(),
        "pairs": pa.int32(),
        "wrong_pairs": pa.list_(pa.string()),
    },
    "effects": {
        "ratio": pa.float64(),
        **dict.fromkeys(("metric", "kind", "axis", "level", "instead_of", "policy"), pa.string()),
        "rank": pa.int32(),
        **dict.fromkeys(("effect", "low", "high"), pa.float64()),
        "paired_over": pa.string(),
        "pairs": pa.int32(),
        **dict.fromkeys(("without", "with", "at_reference", "with_companion", "factor"), pa.float64()),
        "contexts": pa.int32(),
        "lowest": pa.float64(),
        "lowest_with": pa.string(),
        "highest": pa.float64(),
        "highest_with": pa.string(),
        **dict.fromkeys(("layers_agreeing", "layers"), pa.int32()),
    },
    "interactions": {
        "ratio": pa.float64(),
        **dict.fromkeys(("metric", "axis_a", "level_a", "axis_b", "level_b", "policy"), pa.string()),
        "rank": pa.int32(),
        **dict.fromkeys(("interaction", "low", "high"), pa.float64()),
        "paired_over": pa.string(),
        "pairs": pa.int32(),
        **dict.fromkeys(("a_alone", "a_with_b", "b_alone", "b_with_a", "together"), pa.float64()),
    },
}
# Columns that count something: whole numbers per entry; means of them over layers or sequences need not be.
COUNTS = ("achieved", "candidates", "ties", "undefined_heads", "undefined_layers", "undefined_steps")
COUNTS += ("events", "evicted", "fallbacks", "deadline_fallbacks")
# Columns whose kind is not to be read off their values, which may all be null.
KINDS = {
    "undefined_steps": pa.int64(),
    "evaluated_steps": pa.int64(),
    **dict.fromkeys(("predicted_kl_block", "predicted_kl_steps", "predicted_kl_draws"), pa.int64()),
    **dict.fromkeys(("evict_step", "tokens"), pa.list_(pa.int32())),
    "shares": pa.list_(pa.float64()),
    **dict.fromkeys(("predicted_kl_partial", "protected"), pa.string()),
    **dict.fromkeys(("mean_cache_tokens", "peak_cache_tokens"), pa.float64()),
    "no_effect": pa.bool_(),
    "changes": pa.list_(pa.string()),
    **dict.fromkeys(("oracle", "frozen", "capacity_mc_saturated_unit", "capacity_mc_saturated_scaled"), pa.bool_()),
    **dict.fromkeys(("queries", "pool", "kept", "samples", "undefined_samples"), pa.int32()),
}


def _kind(name: str, values: list[Any]) -> pa.DataType | None:
    """The type of a column, from its name first: it must not depend on which layers or policies ran."""
    if name in KINDS:
        return KINDS[name]
    if name.endswith(("_histogram", "_at_risk")):
        return pa.list_(pa.int32())
    if name.startswith("survival_"):
        return pa.list_(pa.float64())
    if name.endswith(("_tokens", "_age_min", "_age_max")):
        return pa.int64()
    if all(value is None or (isinstance(value, int | float) and not isinstance(value, bool)) for value in values):
        return pa.float64()
    return None


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
    fixed = OWN[name] if name in OWN else {**KEY, **PLACE[name]}
    others = list(dict.fromkeys(key for entry in entries for key in entry if key not in fixed))
    columns: dict[str, pa.Array] = {
        key: pa.array([entry.get(key) for entry in entries], type=kind) for key, kind in fixed.items()
    }
    for key in others:
        values = [entry.get(key) for entry in entries]
        columns[key] = pa.array(values, type=_kind(key, values))
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
