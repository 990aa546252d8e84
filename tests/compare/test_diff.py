"""Diff: nothing where nothing is, every planted change found, means and wins against plain loops."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planted import GRADIENTS, LABEL, TINY, repeated, tiny, where, with_value, without_rows

import kvtool
from kvtool.compare import diff
from kvtool.errors import KvtoolError
from kvtool.metrics import columns
from kvtool.replay import replay
from kvtool.result import LIVE, Result

MIRRORED = {"better": "worse", "worse": "better"}


def metric(group: dict[str, Any], name: str, level: str | None = None) -> dict[str, Any]:
    return next(m for m in group["metrics"] if m["metric"] == name and level in (None, m["level"]))


def test_a_result_differs_in_nothing_from_itself(tmp_path: Path) -> None:
    result = tiny()
    result.save(tmp_path / "a")
    found = kvtool.diff(tmp_path / "a", str(tmp_path / "a"))
    assert found.empty
    assert (found.kind, found.worse, found.groups, found.settings, found.findings) == ("identical", False, [], [], [])
    assert found.document()["identical_groups"] == 8
    assert found.document()["only_a"] == found.document()["only_b"] == []


def test_the_same_command_elsewhere_differs_in_nothing_that_decides() -> None:
    a, b = tiny(), tiny()
    b.manifest["environment"]["argv"] = ["kvtool", "replay", "elsewhere.zarr"]
    b.manifest["trace"]["path"] = "elsewhere.zarr"
    found = diff(a, b)
    assert {one["name"] for one in found.settings} == {"environment.argv", "trace.path"}
    assert not any(one["decides"] for one in found.settings)
    assert not found.worse
    assert found.kind == "identical"


@pytest.mark.parametrize("column", [c.name for c in columns() if c.level == "head" and c.name != "predicted_kl_share"])
def test_one_unit_in_the_last_place_of_one_row_is_found(column: str) -> None:
    a = tiny()
    values = a.tables["rows"].column(column).to_pylist()
    row = next(i for i, value in enumerate(values) if value is not None)
    b = with_value(a, "rows", column, row, value_above(values[row]))
    found = diff(a, b, tokens=0)
    entry = a.entries("rows")[row]
    assert found.kind == "numerics"
    assert [group["policy"] for group in found.groups] == [entry["policy"]]
    (group,) = found.groups
    assert metric(group, column)["verdict"] in ("within", "moved")
    assert [one["layer"] for one in group["layers"] if one["kind"] != "identical"] == [entry["layer"]]
    assert not found.worse


def value_above(value: float | int) -> float | int:
    return value + 1 if isinstance(value, int) else math.nextafter(value, math.inf)


@pytest.mark.parametrize(("table", "column"), [("cells", "mean_layer_error"), ("layers", "layer_error")])
def test_one_unit_in_other_tables_is_found(table: str, column: str) -> None:
    a = tiny()
    (row,) = where(a, table, policy="h2o", ratio=0.75, sequence=1, **({"layer": 3} if table == "layers" else {}))
    b = with_value(a, table, column, row, math.nextafter(a.tables[table].column(column)[row].as_py(), 1))
    found = diff(a, b, tokens=0)
    assert [(g["policy"], g["ratio"], g["kind"]) for g in found.groups] == [("h2o", 0.75, "numerics")]


def test_one_token_of_one_head_is_behaviour_and_named() -> None:
    a = tiny()
    (row,) = where(a, "evict_steps", policy="h2o", ratio=0.5, sequence=1, layer=3, kv_head=1)
    steps = a.tables["evict_steps"].column("evict_step")[row].as_py()
    kept = [token for token, step in enumerate(steps[:100]) if step == len(steps)]
    changed = [128 if token == kept[5] else step for token, step in enumerate(steps)]
    found = diff(a, with_value(a, "evict_steps", "evict_step", row, changed), trace=TINY)
    (group,) = found.groups
    assert (group["policy"], group["ratio"], group["kind"], found.kind) == ("h2o", 0.5, "behaviour", "behaviour")
    assert [one["layer"] for one in group["layers"] if one["kind"] == "behaviour"] == [3]
    assert group["kept"]["heads_moved"] == 1
    assert [(t["sequence"], t["token"]) for t in group["tokens"]["lost"]] == [(1, kept[5])]
    assert group["tokens"]["gained"] == []
    assert f"first: sequence 1, layer 3, KV head 1 loses token {kept[5]}" in found.findings[0]
    assert found.findings[0].startswith("behaviour: h2o @0.5 keeps other tokens in layer 3 (1 of 12 KV heads)")


def test_numbers_are_the_means_of_plain_loops() -> None:
    a, b = tiny(), tiny(window=5)
    found = diff(a, b, tokens=0)
    by_side = [result.entries("rows") for result in (a, b)]
    assert len(found.groups) >= 3
    for group in found.groups:
        means = []
        for rows in by_side:
            mine = [r for r in rows if r["policy"] == group["policy"] and r["ratio"] == group["ratio"]]
            means.append([fmean(r["output_error"] for r in mine if r["sequence"] == s) for s in (0, 1)])
        entry = metric(group, "output_error")
        difference = [y - x for x, y in zip(*means, strict=True)]
        assert entry["a"] == pytest.approx(fmean(means[0]), rel=1e-12)
        assert entry["difference"] == pytest.approx(fmean(difference), rel=1e-9)
        assert entry["low"] == pytest.approx(min(difference), rel=1e-9)
        assert entry["ratio"] == pytest.approx(entry["b"] / entry["a"])
        cell = metric(group, "mean_output_error")
        assert cell["a"] == pytest.approx(entry["a"], rel=1e-9)


def test_wins_are_counted_head_by_head() -> None:
    a, b = tiny(), tiny(window=5)
    (group, *_) = [g for g in diff(a, b, tokens=0, relative=0.01).groups if g["policy"] == "h2o"]
    counted = {"a": 0, "b": 0, "even": 0}
    of = [
        [r for r in result.entries("rows") if (r["policy"], r["ratio"]) == ("h2o", group["ratio"])] for result in (a, b)
    ]
    for x, y in zip(*of, strict=True):
        assert (x["layer"], x["q_head"], x["sequence"]) == (y["layer"], y["q_head"], y["sequence"])
        change = y["output_error"] - x["output_error"]
        near = abs(change) <= 1e-9 + 0.01 * x["output_error"]
        counted["even" if near else "a" if change > 0 else "b"] += 1
    assert {side: group["wins"][side] for side in counted} == counted
    for side in counted:
        assert sum(layer[side] for layer in group["wins"]["by_layer"]) == counted[side]


def test_worst_heads_over_many_sequences() -> None:
    base = tiny()
    errors = base.tables["rows"].take(where(base, "rows", sequence=0)).column("policy").to_pylist()
    bad = errors.index("h2o") + 3
    noise = np.random.default_rng(0).normal(0, 1e-4, (6, len(errors)))
    a = repeated(base, 6, lambda s, row: 0.0)
    b = repeated(base, 6, lambda s, row: float(noise[s, row]) + (0.05 if row == bad else 0.0))
    found = diff(a, b, tokens=0)
    group = next(g for g in found.groups if g["policy"] == "h2o" and g["worst_heads"][0]["difference"] > 0.01)
    worst = group["worst_heads"][0]
    expected = base.tables["rows"].take(where(base, "rows", sequence=0)).slice(bad, 1).to_pylist()[0]
    assert (worst["layer"], worst["q_head"], worst["kv_head"]) == tuple(
        expected[n] for n in ("layer", "q_head", "kv_head")
    )
    assert worst["p_holm"] == pytest.approx(worst["p"] * 24)
    assert worst["p_holm"] < 0.001
    assert 0.049 < worst["low"] <= worst["difference"] <= worst["high"] < 0.051
    assert worst["verdict"] == "worse"
    assert group["significant_heads"]["worse"] >= 1
    assert group["significant_heads"]["tested"] == 24
    assert metric(group, "output_error")["sure"] is not None
    differences = [one["difference"] for one in group["worst_heads"]]
    assert differences == sorted(differences, reverse=True)
    assert len(differences) <= 10


def test_one_sequence_has_no_interval_and_no_p() -> None:
    a, b = repeated(tiny(), 1, lambda s, row: 0.0), repeated(tiny(), 1, lambda s, row: 0.01)
    found = diff(a, b, tokens=0).document()
    assert found["interval"] is None
    assert "no interval" in found["interval_note"]
    for group in found["groups"]:
        entry = metric(group, "output_error")
        assert entry["low"] is entry["sure"] is entry["t_low"] is None
        assert entry["verdict"] == "worse"
        assert {head["p"] for head in group["worst_heads"]} == {None}
        assert group["significant_heads"]["tested"] == 0


def test_tolerances_decide_and_metrics_restrict() -> None:
    a, b = repeated(tiny(), 2, lambda s, row: 0.0), repeated(tiny(), 2, lambda s, row: 0.01)
    assert diff(a, b, tokens=0).worse
    assert not diff(b, a, tokens=0).worse
    assert not diff(a, b, tokens=0, absolute=0.0101).worse
    assert not diff(a, b, tokens=0, absolute="output_error=0.0101").worse
    assert diff(a, b, tokens=0, absolute=["0.0101", "output_error=0.009"]).worse
    assert not diff(a, b, tokens=0, metrics="mean_layer_error").worse
    assert diff(a, b, tokens=0, metrics=["output_error"]).worse
    assert diff(a, b, tokens=0, relative={"output_error": 10.0, "": 0.0}).worse  # nothing is a share of full's 0
    chosen = [(side, "h2o") for side in (a, b)]
    assert not diff(*chosen, tokens=0, relative={"output_error": 10.0, "": 0.0}).worse


def test_a_row_that_is_missing_is_listed_and_no_pass() -> None:
    a = tiny()
    rows = where(a, "rows", policy="h2o", ratio=0.5, sequence=1, layer=3)
    b = without_rows(a, "rows", rows)
    found = diff(a, b, tokens=0)
    assert found.worse
    assert found.document()["only_a"] == [
        {
            "policy": "h2o",
            "ratio": 0.5,
            "budget": None,
            "schedule": "prompt-end",
            "event": None,
            "sequence": 1,
            "table": "rows",
            "rows": len(rows),
        }
    ]
    assert "only in A: h2o @0.5" in found.findings[0]
    back = diff(b, a, tokens=0)
    assert not back.worse
    assert back.document()["only_b"] == found.document()["only_a"]


def test_a_number_that_became_null_is_undefined_and_no_pass() -> None:
    a = tiny()
    rows = where(a, "cells", policy="h2o", ratio=0.5, sequence=0)
    b = with_value(a, "cells", "mean_layer_error", rows[0], None)
    found = diff(a, b, tokens=0)
    entry = metric(found.groups[0], "mean_layer_error")
    assert (entry["undefined"], entry["verdict"]) == (1, "undefined")
    assert found.worse
    assert not diff(b, a, tokens=0).worse
    everything = with_value(
        b, "cells", "mean_layer_error", where(a, "cells", policy="h2o", ratio=0.5, sequence=1)[0], None
    )
    entry = metric(diff(a, everything, tokens=0).groups[0], "mean_layer_error")
    assert (entry["a"], entry["b"], entry["difference"], entry["verdict"]) == (None, None, None, "undefined")
    assert diff(everything, everything, tokens=0).empty


def test_an_entry_that_stands_twice_is_refused() -> None:
    a = tiny()
    twice = [*range(a.tables["rows"].num_rows), 3]
    b = Result(a.manifest, {**a.tables, "rows": a.tables["rows"].take(twice)}, [], a.schema)
    with pytest.raises(KvtoolError, match="holds the same entry twice in its table rows") as caught:
        diff(a, b)
    assert caught.value.code == "result-damaged"


def test_metric_versions_that_differ_are_not_compared() -> None:
    a, b = tiny(), repeated(tiny(), 2, lambda s, row: 0.2)
    b.manifest["metrics"]["output_error"] = 2
    found = diff(a, b, tokens=0)
    assert found.findings[0] == "output_error is version 1 in A and 2 in B: it is not compared"
    assert found.document()["refused"] == [found.findings[0]]
    assert found.worse  # a comparison with holes is no pass
    alike = diff(tiny(), with_versions(tiny(), output_error=2), tokens=0)
    assert (alike.kind, alike.groups, alike.worse, alike.empty) == ("identical", [], True, False)
    with pytest.raises(KvtoolError, match="output_error is version 1 in A and 2 in B"):
        diff(a, b, metrics="output_error")
    assert not any(m["metric"].startswith("output_error") for g in found.groups for m in g["metrics"])
    assert found.settings[0]["name"] == "metrics.output_error"


def with_versions(result: Result, **versions: int) -> Result:
    metrics = {**result.manifest["metrics"], **versions}
    return Result({**result.manifest, "metrics": metrics}, result.tables, [], result.schema)


def test_other_traces_pair_the_sequences_of_equal_length() -> None:
    a, b = tiny(), tiny()
    b.manifest["trace"]["digest"] = "0" * 64
    b.manifest["sequences"]["lengths"][1] += 1
    found = diff(a, b, tokens=0)
    assert found.settings[0] == {
        "name": "trace.digest",
        "a": a.manifest["trace"]["digest"],
        "b": "0" * 64,
        "decides": True,
    }
    assert found.document()["sequences"] == 1
    assert {entry["sequence"] for entry in found.document()["only_a"]} == {1}
    assert found.worse
    assert "different traces" in found.warnings[-1]


def test_events_are_told_where_asked_or_where_the_whole_run_hides_them() -> None:
    a = tiny(schedules=("every:8",))
    steps = sorted({e for e in a.tables["rows"].column("event").to_pylist() if e is not None})
    (row, *_) = where(a, "rows", policy="h2o", event=steps[1], layer=3)
    b = with_value(a, "rows", "output_error", row, 9.0)
    found = diff(a, b, tokens=0)
    assert [(g["policy"], g["event"]) for g in found.groups] == [("h2o", steps[1])]
    assert found.worse
    c = with_value(b, "rows", "output_error", where(a, "rows", policy="h2o", event=None, layer=3)[0], 9.0)
    assert [g["event"] for g in diff(a, c, tokens=0).groups] == [None]
    assert {g["event"] for g in diff(a, c, tokens=0, by="event").groups} == {None, steps[1]}


@pytest.mark.parametrize("by", ["layer", "sequence", "kv_head", "q_head", "sequence,q_head"])
def test_groups_by_place_hold_the_rows_of_that_place(by: str) -> None:
    a, b = tiny(), tiny(window=5)
    found = diff(a, b, tokens=0, by=by)
    rows = a.entries("rows")
    assert found.groups
    for group in found.groups:
        conditions = {n: group[n] for n in ("policy", "ratio", "sequence", "layer", "kv_head", "q_head") if n in group}
        mine = [r for r in rows if all(r[n] == v for n, v in conditions.items())]
        assert mine
        errors = [fmean(r["output_error"] for r in mine if r["sequence"] == s) for s in {r["sequence"] for r in mine}]
        assert metric(group, "output_error")["a"] == pytest.approx(fmean(errors), rel=1e-12)
        assert {one["layer"] for one in group["layers"]} == {r["layer"] for r in mine}


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 200), st.sampled_from([0.0, 0.5, 1e-12, None])), max_size=6), st.booleans())
def test_both_directions_mirror_each_other(changes: list[tuple[int, float | None]], decisions: bool) -> None:
    a = tiny()
    b = tiny(window=5) if decisions else a
    for row, value in changes:
        b = with_value(b, "rows", "output_error", row % b.tables["rows"].num_rows, value)
    there, back = (diff(*pair, tokens=0).document() for pair in ((a, b), (b, a)))
    assert there["kind"] == back["kind"]
    assert [(s["name"], s["a"], s["b"]) for s in there["settings"]] == [
        (s["name"], s["b"], s["a"]) for s in back["settings"]
    ]
    assert len(there["groups"]) == len(back["groups"])
    for ours, theirs in zip(there["groups"], back["groups"], strict=True):
        assert (ours["policy"], ours["ratio"], ours["kind"]) == (theirs["policy"], theirs["ratio"], theirs["kind"])
        for x, y in zip(ours["metrics"], theirs["metrics"], strict=True):
            assert (x["a"], x["b"]) == (y["b"], y["a"])
            assert x["difference"] == (None if y["difference"] is None else pytest.approx(-y["difference"], abs=1e-15))
            if "within" not in (x["verdict"], y["verdict"]):  # tolerances are relative to A
                assert x["verdict"] == MIRRORED.get(y["verdict"], y["verdict"])
                assert x["sure"] == y["sure"]
        assert (ours["kept"] or {}).get("jaccard") == (theirs["kept"] or {}).get("jaccard")
    json.dumps(there, allow_nan=False)


def test_live_results_are_compared_by_what_they_measure() -> None:
    a = tiny()
    cells = a.tables["cells"].append_column("measured_kl", a.tables["cells"].column("mean_output_error"))
    live = Result(a.manifest, {**a.tables, "cells": cells}, [], LIVE)
    assert diff(live, live).empty
    (row, *_) = where(live, "cells", policy="h2o", sequence=1)
    worse = with_value(live, "cells", "measured_kl", row, 3.0)
    found = diff(live, worse, tokens=0)
    assert metric(found.groups[0], "measured_kl")["verdict"] == "worse"
    assert found.worse
    with pytest.raises(KvtoolError, match="they measure different things"):
        diff(a, live)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"by": "head"}, "--by head is unknown"),
        ({"metrics": "output_eror"}, "there is no metric 'output_eror'"),
        ({"relative": "-1"}, "is no tolerance"),
        ({"relative": "nan"}, "is no tolerance"),
        ({"absolute": "output_error=much"}, "is no tolerance"),
        ({"absolute": "nonsense=1"}, "a tolerance names 'nonsense'"),
        ({"trace": "nowhere.zarr"}, "nowhere.zarr"),
    ],
)
def test_bad_requests_are_one_sentence(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(KvtoolError, match=words):
        diff(tiny(), tiny(window=5), **arguments)


def test_a_trace_that_is_another_one_is_refused() -> None:
    with pytest.raises(KvtoolError, match="is not the trace of either result"):
        diff(tiny(), tiny(window=5), trace=TINY.with_name("smollm2.zarr"))


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_entries_are_paired_by_key_whatever_their_order(seed: int) -> None:
    random = np.random.default_rng(seed)
    a = tiny(schedules=("every:8",))
    shuffled = {name: table.take(random.permutation(table.num_rows)) for name, table in a.tables.items()}
    b = Result(a.manifest, shuffled, [], a.schema)
    assert diff(a, b).empty
    row = int(random.choice(where(b, "rows", policy="h2o", event=None)))
    key = ("sequence", "layer", "q_head")
    entry = b.entries("rows")[row]
    found = diff(a, with_value(b, "rows", "output_error", row, 7.0), tokens=0, by=",".join(key))
    assert [tuple(group[name] for name in key) for group in found.groups] == [tuple(entry[name] for name in key)]


@pytest.mark.parametrize("column", ["output_error_p99", "evicted_mass", "direction_gap"])
def test_details_explain_and_decide_only_where_they_are_asked_for(column: str) -> None:
    a = tiny()
    (row, *_) = where(a, "rows", policy="h2o")
    b = with_value(a, "rows", column, row, 50.0)
    found, asked = diff(a, b, tokens=0), diff(a, b, tokens=0, metrics=column)
    (detail,) = (one for one in found.groups[0]["metrics"] if one["metric"] == column)
    assert (detail["verdict"], detail["decides"], found.worse) == ("worse", False, False)
    assert any(sentence.startswith("worse in detail only: h2o") and column in sentence for sentence in found.findings)
    assert asked.worse
    assert asked.findings[-1].startswith("worse: h2o")


@pytest.mark.parametrize(("table", "column"), [("rows", "output_error"), ("layers", "layer_error")])
def test_errors_of_heads_and_layers_decide(table: str, column: str) -> None:
    a = tiny()
    (row, *_) = where(a, table, policy="h2o")
    assert diff(a, with_value(a, table, column, row, 50.0), tokens=0).worse


def with_metric(result: Result, version: int = 1, window: int = 3) -> Result:
    """A copy with a metric of somebody else's, whose column is the output error under another name."""
    rows = result.tables["rows"].append_column("spread", result.tables["rows"].column("output_error"))
    manifest = {**result.manifest, "metrics": {**result.manifest["metrics"], "spread": version}}
    column = {"name": "spread", "level": "head", "unit": "nats", "direction": "higher", "meaning": "", "share": False}
    described = {"label": "mine.py:Spread", "name": "spread", "version": version, "class": "Spread"}
    described |= {"source": "0" * 64, "package": None, "parameters": {"window": window}, "columns": [column]}
    manifest["replay"] = {**manifest["replay"], "metrics": [described]}
    return Result(manifest, {**result.tables, "rows": rows}, [], result.schema)


def test_metrics_of_others_are_compared_as_the_manifest_describes_them() -> None:
    a = with_metric(tiny())
    (row, *_) = where(a, "rows", policy="h2o", layer=3)
    found = diff(a, with_value(a, "rows", "spread", row, 0.0), tokens=0)
    entry = metric(found.groups[0], "spread")
    assert (entry["unit"], entry["direction"], entry["verdict"], found.worse) == ("nats", "higher", "worse", True)
    other = diff(a, with_metric(tiny(), version=2, window=4))
    assert [one["name"] for one in other.settings] == [
        "replay.metrics[mine.py:Spread].version",
        "replay.metrics[mine.py:Spread].parameters.window",
        "metrics.spread",
    ]
    assert "spread is version 1 in A and 2 in B" in other.findings[0]
    named = [(one["metric"], one["level"]) for one in found.groups[0]["metrics"]]
    assert len(named) == len(set(named))
    lacking = diff(a, tiny())
    assert ("spread (head) is in A and not in B" in lacking.findings[0], lacking.worse) == (True, True)
    more = diff(tiny(), a)
    assert ("only B holds spread" in more.warnings[0], more.worse) == (True, False)


def test_a_group_with_equal_decisions_tells_of_no_sets_and_no_token() -> None:
    a = tiny()
    (group,) = diff(a, with_value(a, "rows", "output_error", 0, 3.0)).groups
    assert (group["kept"], group["tokens"], group["first"]) == (None, None, None)


def test_a_word_that_is_a_column_names_that_column_alone() -> None:
    a = tiny()
    b = with_value(a, "rows", "output_error_p99", where(a, "rows", policy="h2o")[0], 50.0)
    assert not diff(a, b, metrics="output_error", tokens=0).worse
    c = with_value(a, "rows", "output_error", where(a, "rows", policy="h2o")[0], 50.0)
    (group,) = diff(a, c, metrics="output_error", tokens=0).groups
    assert [(one["metric"], one["level"]) for one in group["metrics"]] == [("output_error", "head")]
    (group,) = diff(a, c, metrics=["cache_size", "output_error"], tokens=0).groups  # a metric without such a column
    assert "mean_cache_tokens" in {one["metric"] for one in group["metrics"]}


@pytest.mark.parametrize(
    ("metrics", "by", "said"),
    [
        ("mean_layer_error", "layer", "mean_layer_error has no value for each layer: it speaks of a whole cell"),
        ("mean_output_error", "q_head", "for each layer and kv_head and q_head"),
        ("layer_error", "kv_head", "layer_error has no value for each layer and kv_head: it speaks of a layer"),
    ],
)
def test_a_metric_without_a_value_at_such_a_place_is_refused(metrics: str, by: str, said: str) -> None:
    with pytest.raises(KvtoolError, match=said) as caught:
        diff(tiny(), tiny(window=7), metrics=metrics, by=by)
    assert caught.value.code == "usage"
    assert caught.value.hint is not None
    assert "output_error" in caught.value.hint


@pytest.mark.parametrize(("by", "each"), [("", 2), ("sequence", 1), ("q_head", 2), ("sequence,layer", 1)])
def test_groups_know_their_sequences_and_kept_sets_are_counted_once(by: str, each: int) -> None:
    found = diff(tiny(), tiny(window=7), by=by, tokens=0).document()
    assert {group["sequences"] for group in found["groups"]} == {each}
    cells, heads = 2 * 4, 2 * 3 * 2  # ratios x (policies and controls); sequences x layers x KV heads
    assert found["kept_sets"]["of"] == cells * heads
    assert 0 < found["kept_sets"]["moved"] < cells * heads


def scaled(result: Result, table: str, column: str, factor: float) -> Result:
    """A copy with one column multiplied."""
    values = [None if v is None else factor * v for v in result.tables[table].column(column).to_pylist()]
    place = result.tables[table].column_names.index(column)
    changed = result.tables[table].set_column(place, column, pa.array(values, type=pa.float64()))
    return Result(result.manifest, {**result.tables, table: changed}, [], result.schema)


@pytest.mark.parametrize("by", ["", "event", "sequence", "layer", "kv_head", "q_head", "sequence,layer"])
@pytest.mark.parametrize(("table", "column"), [("cells", "mean_layer_error"), ("layers", "layer_error")])
def test_how_groups_are_told_apart_decides_nothing(by: str, table: str, column: str) -> None:
    a = tiny()
    found = diff(a, scaled(a, table, column, 3.0), by=by, tokens=0)
    assert (found.worse, found.kind) == (True, "numerics")
    assert not found.empty
    assert not diff(scaled(a, table, column, 3.0), a, by=by, tokens=0).worse
    whole = found.document()["whole"]
    assert (whole is None) == (by == "")
    assert {group["policy"] for group in whole or found.groups} == {"h2o", LABEL, "random"}


def test_where_nothing_decides_there_is_no_pass() -> None:
    a = tiny()
    names = ("mean_layer_error", "mean_output_error", "predicted_kl", "predicted_kl_w32", "layer_error", "output_error")
    tables = {n: t.drop_columns([c for c in names if c in t.column_names]) for n, t in a.tables.items()}
    bare = Result(a.manifest, tables, [], a.schema)
    found = diff(a, bare)
    assert found.worse
    assert "mean_layer_error (cell) is in A and not in B" in found.findings
    both = diff(bare, bare)
    assert both.worse
    assert both.findings == ["no error and no prediction is in both, so nothing decides whether B is worse"]


def test_details_that_became_null_are_no_hole() -> None:
    a = tiny()
    rows = where(a, "rows", policy="h2o")
    detail, error = (with_value(a, "rows", name, rows[0], None) for name in ("direction_gap", "output_error"))
    assert not diff(a, detail, tokens=0).worse
    found = diff(a, error, tokens=0)
    assert (found.worse, found.groups[0]["lost"]) == (True, ["output_error"])
    cells = where(a, "cells", policy="h2o", ratio=0.5, sequence=0)
    gone = with_value(a, "cells", "mean_layer_error", cells[0], None)
    assert diff((a, "h2o@0.75"), (gone, "h2o@0.5"), metrics="mean_layer_error").groups[0]["lost"] == [
        "mean_layer_error"
    ]


def test_means_over_other_layers_are_not_compared() -> None:
    a, b = (replay(TINY, ["h2o"], ratios=["0.5"], sinks=1, window=8, layers=ids) for ids in ([0, 5], [0, 3, 5]))
    found = diff(a, b, tokens=0)
    assert (found.worse, found.groups) == (False, [])
    assert "other layers (0,5 and 0,3,5)" in found.warnings[0]
    with pytest.raises(KvtoolError, match="other layers"):
        diff(a, b, metrics="mean_layer_error")
    assert diff(b, a).worse  # layer 3 has no partner


def test_predictions_of_other_blocks_are_not_compared() -> None:
    a = replay(GRADIENTS, ["h2o"], ratios=["0.5"], layers=list(range(30)))
    b = scaled(a, "cells", "predicted_kl", 0.5)
    assert any(m["metric"] == "predicted_kl" for g in diff(a, b, tokens=0).groups for m in g["metrics"])
    tables = dict(b.tables)
    for name in ("cells", "layers", "rows"):
        place = tables[name].column_names.index("predicted_kl_block")
        column = pa.array([8] * tables[name].num_rows, type=pa.int64())
        tables[name] = tables[name].set_column(place, "predicted_kl_block", column)
    found = diff(a, Result(b.manifest, tables, [], b.schema), tokens=0)
    assert not any(m["metric"].startswith("predicted_kl") and m["a"] for g in found.groups for m in g["metrics"])
    assert found.findings[0].startswith("predicted_kl is not compared where its gradients were cut into blocks")
    assert found.worse


def test_infinity_is_no_number() -> None:
    a = tiny()
    (row, *_) = where(a, "rows", policy="h2o")
    endless = with_value(a, "rows", "output_error", row, math.inf)
    assert diff(a, endless, tokens=0).groups[0]["lost"] == ["output_error"]
    assert diff(endless, scaled(endless, "rows", "output_error", 5.0), tokens=0).worse
