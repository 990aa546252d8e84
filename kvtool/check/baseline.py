"""Baseline: what was found when somebody last said "this is right", as JSON that is read in reviews.

    {"jobs": {NAME: {"trace": digest, "settings": {…}, "metrics": {metric: version},
                     "cells": {"snapkv @0.5 prompt-end sequence 0": {metric: number or null}},
                     "decisions": {"snapkv @0.5 prompt-end sequence 0 layer 7": LAYER}}},
     "schema": "kvtool.baseline/1"}

where LAYER is {"digest": 20 hex digits, "error": number or null, "heads": [8 hex digits per KV head],
"kept": [rows never evicted], "near_ties": [tokens]}.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvtool.errors import KvtoolError
from kvtool.files import write_durably, writing

SCHEMA = "kvtool.baseline/1"
LISTS = {"heads": str, "kept": int, "near_ties": int}


def read_baseline(path: Path) -> dict[str, dict[str, Any]] | None:
    """Job name -> what the baseline says of it; None where there is no baseline yet.

    Raises:
        KvtoolError: code `baseline` for a file that kvtool did not write.
    """
    if not path.exists():
        return None
    try:
        document = json.loads(path.read_bytes().decode("utf-8"), parse_constant=_no_constant)
        _expect(document["schema"] == SCHEMA, f"its schema is {document['schema']!r}, expected {SCHEMA!r}")
        jobs: dict[str, dict[str, Any]] = document["jobs"]
        for name, job in jobs.items():
            _check_job(name, job)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else " ".join(str(error).split())
        raise KvtoolError(
            "baseline",
            f"{path} cannot be read as a baseline: {reason}",
            "bring it back from version control; after a merge conflict run kvtool check --update",
        ) from error
    return jobs


def write_baseline(path: Path, jobs: Mapping[str, Mapping[str, Any]]) -> bool:
    """Write the file whole or not at all; False where it already says exactly this, and nothing was written.

    Raises:
        KvtoolError: `disk-full` or `write-failed`; the former file is then untouched.
    """
    raw, path = baseline_bytes(jobs), path.resolve()  # behind a link, not instead of it
    with writing(path, "the former baseline is whole; free some space and run it again"):
        if path.is_file() and path.read_bytes() == raw:
            return False
        write_durably(path, raw)
    return True


def baseline_bytes(jobs: Mapping[str, Mapping[str, Any]]) -> bytes:
    """The file: keys sorted, one line for every cell and every layer of decisions, a newline at the end."""
    lines = ["{", ' "jobs": {']
    for number, (name, job) in enumerate(sorted(jobs.items())):
        lines.append(f"  {_json(name)}: {{")
        fields = sorted(job.items())
        for place, (field, value) in enumerate(fields):
            comma = "," if place + 1 < len(fields) else ""
            if field in ("cells", "decisions"):
                rows = [f"    {_json(key)}: {_json(row)}" for key, row in sorted(value.items())]
                body = ["{", ",\n".join(rows), "   }"] if rows else ["{}"]
                lines.append(f"   {_json(field)}: " + "\n".join(body) + comma)
            else:
                lines.append(f"   {_json(field)}: {_json(value)}{comma}")
        lines.append("  }" + ("," if number + 1 < len(jobs) else ""))
    lines += [" },", f' "schema": {_json(SCHEMA)}', "}", ""]
    return "\n".join(lines).encode()


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False)


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is no number that a baseline holds")


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _check_job(name: str, job: Any) -> None:
    where = f"job {name!r}"
    _expect(isinstance(job["trace"], str), f"{where} names no trace")
    _expect(isinstance(job["settings"], dict) and isinstance(job["metrics"], dict), f"{where} is not whole")
    for key, values in job["cells"].items():
        _expect(all(_is_number(value) for value in values.values()), f"{where}, {key!r}: no numbers")
    for key, entry in job["decisions"].items():
        cell, _, layer = key.rpartition(" layer ")
        _expect(bool(cell) and layer.isdecimal(), f"{where}, {key!r} names no layer")
        _expect(isinstance(entry["digest"], str) and _is_number(entry["error"]), f"{where}, {key!r}: no digest")
        for field, kind in LISTS.items():
            sound = isinstance(entry[field], list) and len(entry[field]) == len(entry["heads"])
            _expect(sound and all(type(one) is kind for one in entry[field]), f"{where}, {key!r}: bad {field}")
