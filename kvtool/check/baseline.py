"""Baseline: what was found when somebody last said "this is right", as JSON that is read in reviews.

    {"jobs": {NAME: {"trace": digest, "settings": {…}, "metrics": {column: version},
                     "asked": {metric: {"label": …, "parameters": {…}, "columns": […]}},
                     "cells": {"snapkv @0.5 prompt-end sequence 0": {column: number or null}},
                     "decisions": {"snapkv @0.5 prompt-end sequence 0 layer 7": LAYER}}},
     "schema": "kvtool.baseline/1", "suite": file name of the suite}

where LAYER is {"digest": 20 hex digits, "error": number or null, "heads": [8 hex digits per KV head],
"kept": [rows never evicted], "cuts": {KV head: kvtool.check.cuts}}. `asked` and `cuts` are left out where empty.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvtool.check.cuts import short_digest, unpacked
from kvtool.errors import KvtoolError
from kvtool.files import write_durably, writing

SCHEMA = "kvtool.baseline/1"
LISTS = {"heads": str, "kept": int}
LARGEST = 2**53  # whole numbers up to here are numbers in every JSON reader
HINT = "bring it back from version control, or record everything anew with kvtool check SUITE --update --force"


def read_baseline(path: Path, suite: str | None = None, hint: str = HINT) -> dict[str, dict[str, Any]] | None:
    """Job name -> what the baseline says of it; None where there is no baseline yet.

    Args:
        suite: file name of the suite that reads it; None reads that of any.

    Raises:
        KvtoolError: `baseline` for a file that kvtool did not write, or not for this suite.
    """
    if not path.exists():
        return None
    try:
        document = json.loads(
            path.read_bytes().decode("utf-8"),
            parse_constant=_no_constant,
            parse_float=_finite,
            parse_int=_whole,
            object_pairs_hook=_once,
        )
        _expect(document["schema"] == SCHEMA, f"its schema is {document['schema']!r}, expected {SCHEMA!r}")
        jobs: dict[str, dict[str, Any]] = document["jobs"]
        for name, job in jobs.items():
            _check_job(name, job)
        owner = document.get("suite", suite)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else " ".join(str(error).split())
        raise KvtoolError("baseline", f"{path} cannot be read as a baseline: {reason}", hint) from error
    if suite is not None and owner != suite:
        sentence = f"{path} is the baseline of another suite, {owner!r}, and this one is {suite!r}"
        other = "give every suite a baseline of its own; if the suite was renamed, record everything anew with "
        raise KvtoolError("baseline", sentence, f"{other}--update --force")
    return jobs


def write_baseline(path: Path, jobs: Mapping[str, Mapping[str, Any]], suite: str | None = None) -> bool:
    """Write the file whole or not at all; False where it already says exactly this, and nothing was written.

    Raises:
        KvtoolError: `disk-full` or `write-failed`; the former file is then untouched.
    """
    raw, path = baseline_bytes(jobs, suite), path.resolve()  # behind a link, not instead of it
    with writing(path, "the former baseline is whole; free some space and run it again"):
        if path.is_file() and path.read_bytes() == raw:
            return False
        write_durably(path, raw)
    return True


def baseline_bytes(jobs: Mapping[str, Mapping[str, Any]], suite: str | None = None) -> bytes:
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
    of_suite = [] if suite is None else [f' "suite": {_json(suite)}']
    lines += [" },", f' "schema": {_json(SCHEMA)}' + ("," if of_suite else ""), *of_suite, "}", ""]
    return "\n".join(lines).encode()


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False)


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is no number that a baseline holds")


def _finite(word: str) -> float:
    number = float(word)
    _expect(math.isfinite(number), f"{word} is no finite number")
    return number


def _whole(word: str) -> int:
    _expect(len(word) <= 17 and abs(int(word)) <= LARGEST, f"{word[:20]} is larger than any number a baseline holds")
    return int(word)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A merge that kept both sides leaves a key twice, and JSON readers would take the last without a word."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        _expect(key not in found, f"{key!r} stands there twice")
        found[key] = value
    return found


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)


def _is_number(value: Any) -> bool:
    return value is None or type(value) in (int, float)


def _check_job(name: str, job: Any) -> None:
    where = f"job {name!r}"
    _expect(isinstance(job["trace"], str), f"{where} names no trace")
    _expect(isinstance(job["settings"], dict) and isinstance(job["metrics"], dict), f"{where} is not whole")
    _expect(all(type(version) is int for version in job["metrics"].values()), f"{where}: a version is no number")
    for metric, asked in job.get("asked", {}).items():
        sound = isinstance(asked["label"], str) and isinstance(asked["parameters"], dict)
        sound = sound and isinstance(asked["columns"], list) and all(isinstance(one, str) for one in asked["columns"])
        _expect(sound, f"{where}: metric {metric!r} is not whole")
    for key, values in job["cells"].items():
        _expect(all(_is_number(value) for value in values.values()), f"{where}, {key!r}: no numbers")
    for key, entry in job["decisions"].items():
        _check_layer(f"{where}, {key!r}", key, entry)


def _check_layer(where: str, key: str, entry: Any) -> None:
    cell, _, layer = key.rpartition(" layer ")
    _expect(bool(cell) and layer.isascii() and layer.isdecimal(), f"{where} names no layer")
    _expect(isinstance(entry["digest"], str) and _is_number(entry["error"]), f"{where}: no digest")
    heads, kept = entry["heads"], entry["kept"]
    for field, kind in LISTS.items():
        sound = isinstance(entry[field], list) and len(entry[field]) == len(heads) > 0
        _expect(sound and all(type(one) is kind for one in entry[field]), f"{where}: bad {field}")
    for head, cuts in entry.get("cuts", {}).items():
        _expect(head in map(str, range(len(heads))), f"{where}: cuts of KV head {head!r}, which it lacks")
        steps, _ = unpacked(cuts)
        fits = short_digest(steps) == heads[int(head)] and int((steps == len(steps)).sum()) == kept[int(head)]
        _expect(fits, f"{where}: the cuts of KV head {head} are not those of its digest")
