"""The baseline's bytes: sorted, a line per row, the same every time; what kvtool did not write is refused."""

from __future__ import annotations

import base64
import copy
import json
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtool.check.baseline import baseline_bytes, read_baseline, write_baseline
from kvtool.check.cuts import packed, same_cuts, short_digest, unpacked
from kvtool.errors import KvtoolError

STEPS = np.array([6, 6, 8, 8, 8, 8, 8, 8])
CUTS = packed(STEPS, [4, 6], [0, 2], [0, 1], [1, 3])
assert CUTS is not None
LAYER = {"digest": "ab", "error": 0.25, "heads": ["a", short_digest(STEPS)], "kept": [3, 6], "cuts": {"1": CUTS}}
JOBS: dict[str, Any] = {
    "b": {
        "trace": "00",
        "settings": {"window": 8, "evaluate": "live"},
        "metrics": {"error": 1},
        "asked": {"error": {"label": "error:limit=0.5", "parameters": {"limit": 0.5}, "columns": ["error"]}},
        "cells": {"z": {"error": 0.1, "count": None}, "a": {"error": 1e-300, "count": 12}},
        "decisions": {"z layer 3": LAYER, "a layer 3": LAYER},
    },
    "a": {"trace": "00", "settings": {}, "metrics": {}, "cells": {}, "decisions": {}},
}


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "check.json"
    assert read_baseline(path) is None
    assert write_baseline(path, JOBS)
    assert read_baseline(path) == JOBS


def test_the_order_of_the_entries_does_not_show(tmp_path: Path) -> None:
    backwards = {name: dict(reversed(list(job.items()))) for name, job in reversed(list(JOBS.items()))}
    assert baseline_bytes(backwards) == baseline_bytes(JOBS)
    text = baseline_bytes(JOBS).decode()
    assert text.endswith("}\n")
    document = json.loads(text)
    assert json.dumps(document, sort_keys=True) == json.dumps(document)  # every key sorted
    lines = [line.strip() for line in text.splitlines()]
    assert '"a": {"count": 12, "error": 1e-300},' in lines
    assert f'"z layer 3": {json.dumps(LAYER, sort_keys=True)}' in lines


def test_a_baseline_that_says_it_already_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "check.json"
    write_baseline(path, JOBS)
    os.utime(path, ns=(1, 1))
    assert not write_baseline(path, copy.deepcopy(JOBS))
    assert path.stat().st_mtime_ns == 1


def test_behind_a_link_the_file_is_written_and_the_link_stays(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    link = tmp_path / "check.json"
    link.symlink_to(tmp_path / "far" / "real.json")
    write_baseline(link, JOBS)
    assert link.is_symlink()
    assert read_baseline(tmp_path / "far" / "real.json") == JOBS


def without(*keys: str) -> dict[str, Any]:
    """The jobs without what these keys lead to in job b."""
    jobs = copy.deepcopy(JOBS)
    place = jobs["b"]
    for key in keys[:-1]:
        place = place[key]
    del place[keys[-1]]
    return jobs


def changed_layer(**fields: Any) -> dict[str, Any]:
    jobs = copy.deepcopy(JOBS)
    jobs["b"]["decisions"]["z layer 3"].update(fields)
    return jobs


BAD = {
    "empty": b"",
    "half": baseline_bytes(JOBS)[:200],
    "a merge conflict": baseline_bytes(JOBS).replace(b' "jobs"', b'<<<<<<< ours\n "jobs"'),
    "a list": b"[]",
    "another schema": baseline_bytes(JOBS).replace(b"baseline/1", b"baseline/2"),
    "NaN": baseline_bytes(JOBS).replace(b"0.1", b"NaN"),
    "a word for a number": baseline_bytes(JOBS).replace(b"0.1", b'"0.1"'),
    "a flag for a number": baseline_bytes(JOBS).replace(b"0.1", b"true"),
    "no cells": baseline_bytes(without("cells")),
    "no heads": baseline_bytes(without("decisions", "z layer 3", "heads")),
    "a layer without a number": baseline_bytes(JOBS).replace(b"z layer 3", b"z layer x"),
    "lists of two lengths": baseline_bytes(JOBS).replace(b"[3, 6]", b"[3]"),
    "lists with nothing in them": baseline_bytes(changed_layer(heads=[], kept=[], cuts={})),
    "infinity": baseline_bytes(JOBS).replace(b"0.1", b"1e999"),
    "a huge number": baseline_bytes(JOBS).replace(b"0.1", b"9" * 30),
    "a huger number": baseline_bytes(JOBS).replace(b"0.1", b"9" * 5000),
    "a number for a setting that is none": baseline_bytes(JOBS).replace(b'"window": 8', b'"window": 1e999'),
    "an error that is a flag": baseline_bytes(JOBS).replace(b'"error": 0.25', b'"error": false'),
    "a version that is none": baseline_bytes(JOBS).replace(b'{"error": 1}', b'{"error": true}'),
    "both sides of a merge": baseline_bytes(JOBS).replace(b'"count": 12', b'"count": 12, "count": 13'),
    "a job twice": baseline_bytes(JOBS).replace(b'  "b": {', b'  "a": {'),
    "parameters without columns": baseline_bytes(without("asked", "error", "columns")),
    "cuts of no head": baseline_bytes(changed_layer(cuts={"2": CUTS})),
    "cuts of another head": baseline_bytes(changed_layer(cuts={"0": CUTS})),
    "cuts that are cut off": baseline_bytes(changed_layer(cuts={"1": {**CUTS, "evict_step": CUTS["evict_step"][:-8]}})),
    "cuts of no zlib": baseline_bytes(changed_layer(cuts={"1": {**CUTS, "evict_step": "AAAA"}})),
    "cuts without events": baseline_bytes(changed_layer(cuts={"1": {**CUTS, "events": []}})),
    "more exact ties than near ones": baseline_bytes(changed_layer(cuts={"1": {**CUTS, "events": [[6, 2, [3]]]}})),
    "not UTF-8": b"\xff\xfe",
    "deep": b"[" * 100_000,
}


@pytest.mark.parametrize("case", BAD)
def test_what_kvtool_did_not_write_is_refused(case: str, tmp_path: Path) -> None:
    path = tmp_path / "check.json"
    path.write_bytes(BAD[case])
    with pytest.raises(KvtoolError) as caught:
        read_baseline(path)
    assert caught.value.code == "baseline"
    assert str(path) in caught.value.message


def test_cuts_come_back_whatever_zlib_makes_of_them() -> None:
    steps, cuts = unpacked(CUTS)
    assert steps.tolist() == STEPS.tolist()
    assert (cuts.near, cuts.exact) == (
        {6: {1, 3}},
        {6: 1},
    )  # an event without near ties cannot part decisions by rounding
    assert packed(STEPS, [4], [0], [0], []) is None
    assert packed(STEPS, [4], [5000], [0], None) is None
    raw = zlib.compress(STEPS.astype("<i4").tobytes(), 0)
    spelled_otherwise = {**CUTS, "evict_step": base64.b64encode(raw).decode()}
    assert spelled_otherwise != CUTS
    assert same_cuts(spelled_otherwise, CUTS)
    assert not same_cuts({**CUTS, "events": [[6, 1, [1, 2]]]}, CUTS)


def test_a_baseline_of_another_suite_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "check.json"
    write_baseline(path, JOBS, "gate.toml")
    assert read_baseline(path, "gate.toml") == JOBS
    assert read_baseline(path) == JOBS
    with pytest.raises(KvtoolError, match=r"baseline of another suite, 'gate.toml', and this one is 'other.toml'"):
        read_baseline(path, "other.toml")
    write_baseline(path, JOBS)  # as one that names no suite
    assert read_baseline(path, "other.toml") == JOBS
