"""Metrics by name: their columns in every table, what is kept of them, and how their faults are told."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from made_up import METRIC, POLICY, Install

from kvtool.cli.main import run
from kvtool.errors import KvtoolError
from kvtool.metrics import built_in_metrics
from kvtool.metrics.declared import FAMILIES, taken
from kvtool.replay import replay
from kvtool.report.summary import sections
from kvtool.report.terminal import replay_table
from kvtool.result import Result, table_of

TINY = Path(__file__).resolve().parents[2] / "sample_traces" / "tiny-gqa.zarr"
CUT: dict[str, Any] = {"ratios": ["0.5"], "layers": [0, 5], "sinks": 1, "window": 8}


@pytest.fixture
def own(tmp_path: Path) -> Callable[[str], str]:
    """A metric in a file of its own: source -> its word."""

    def one(source: str, name: str = "own") -> str:
        (tmp_path / f"{name}.py").write_text(source)
        return f"{tmp_path}/{name}.py:Worst"

    return one


def test_columns_stand_in_their_tables_with_the_numbers_they_should_have(install: Install) -> None:
    install("new-ways", "2.5", metrics={"worst": "measures:Worst"}, measures=METRIC)
    result = replay(TINY, ["knorm"], metrics=["worst"], **CUT)
    plain = replay(TINY, ["knorm"], **CUT)
    for table, column in (("rows", "worst_tokens"), ("layers", "worst_layer"), ("cells", "worst_cell")):
        assert result.tables[table].schema.field(column).type == pa.float64(), table
        assert (
            result.tables[table]
            .drop_columns([column, *(["layers_seen"] if table == "cells" else [])])
            .equals(plain.tables[table])
        ), table
    # the worst step of a head is what the built-in metric says too
    for row in result.entries("rows"):
        assert row["worst_tokens"] == row["output_error_max"]
    heads = [row for row in result.entries("rows") if row["policy"] == "knorm"]
    for layer in result.entries("layers"):
        if layer["policy"] == "knorm":
            mine = [h for h in heads if (h["sequence"], h["layer"]) == (layer["sequence"], layer["layer"])]
            assert layer["worst_layer"] == max(h["worst_tokens"] for h in mine)
    cells = {c["sequence"]: c for c in result.entries("cells") if c["policy"] == "knorm"}
    for sequence in (0, 1):
        assert cells[sequence]["worst_cell"] == max(h["worst_tokens"] for h in heads if h["sequence"] == sequence)
        assert cells[sequence]["layers_seen"] == 2
    assert cells[None]["worst_cell"] == pytest.approx((cells[0]["worst_cell"] + cells[1]["worst_cell"]) / 2, rel=1e-15)
    assert result.tables["evict_steps"].equals(plain.tables["evict_steps"])


def test_the_manifest_names_version_package_and_columns(install: Install) -> None:
    install("new-ways", "2.5", metrics={"worst": "measures_b:Worst"}, measures_b=METRIC)
    manifest = replay(TINY, ["knorm"], metrics=["worst:times=2"], **CUT).manifest
    assert manifest["metrics"] == {**{n: m.version for n, m in built_in_metrics().items()}, "worst": 3}
    (said,) = manifest["replay"]["metrics"]
    assert (said["label"], said["package"]) == ("worst:times=2.0", {"name": "new-ways", "version": "2.5"})
    assert said["parameters"] == {"times": 2.0}
    assert len(said["source"]) == 64
    assert {"name": "worst_cell", "level": "cell", "unit": "relative L2", "direction": "lower"}.items() <= said[
        "columns"
    ][2].items()
    json.dumps(manifest)
    without = replay(TINY, ["knorm"], **CUT).manifest
    assert "worst" not in without["metrics"]
    assert without["replay"]["metrics"] == []


def test_a_stopped_run_resumes_with_its_metrics_and_another_version_is_measured_anew(
    own: Callable[[str], str], tmp_path: Path
) -> None:
    word, out = own(METRIC), tmp_path / "out"
    whole = replay(TINY, ["knorm"], metrics=[word], **CUT)

    class Stop(Exception):
        pass

    def stop_after(count: int) -> Callable[[int, int, str], None]:
        def progress(done: int, total: int, what: str) -> None:
            if done == count:
                raise Stop

        return progress

    with pytest.raises(Stop):
        replay(TINY, ["knorm"], metrics=[word], output=out, progress=stop_after(2), **CUT)
    kept = {path.name for path in (out / "parts").iterdir() if path.is_dir()}
    assert len(kept) == 2
    with pytest.raises(KvtoolError, match="other options"):  # they are the parts of another metric
        replay(TINY, ["knorm"], metrics=[own(METRIC + "\n# changed\n")], output=out, **CUT)
    assert {path.name for path in (out / "parts").iterdir() if path.is_dir()} == kept
    resumed = replay(TINY, ["knorm"], metrics=[own(METRIC)], output=out, **CUT)
    for name, table in whole.tables.items():
        assert resumed.tables[name].equals(table), name
    read = Result.load(out)
    assert read.tables["rows"].schema.field("worst_tokens").type == pa.float64()
    assert read.tables["rows"]["worst_tokens"].to_pylist() == whole.tables["rows"]["worst_tokens"].to_pylist()


def test_entries_per_event_have_the_columns_too(own: Callable[[str], str]) -> None:
    result = replay(TINY, ["knorm"], metrics=[own(METRIC)], budgets=[40], schedules=["every:8"], layers=[0, 5])
    events = [row for row in result.entries("rows") if row["event"] is not None]
    assert events
    for row in events:
        assert row["worst_tokens"] == row["output_error_max"]
    spans = [cell for cell in result.entries("cells") if cell["event"] is not None and cell["sequence"] == 0]
    assert all(cell["layers_seen"] == 2 for cell in spans)


def test_the_table_shows_cell_columns_and_says_where_the_others_are(own: Callable[[str], str]) -> None:
    result = replay(TINY, ["knorm"], metrics=[own(METRIC)], **CUT)
    table = replay_table(result, 60)[0]
    titles = [str(column.header) for column in table.columns]
    assert titles[titles.index("error") + 1 :][:2] == ["worst_cell", "layers_seen"]
    (section,) = sections(result)
    cell = next(c for c in result.entries("cells") if c["sequence"] is None and c["policy"] == "knorm")
    line = section.line("knorm")
    assert line is not None
    assert line.asked == {"worst_cell": cell["worst_cell"], "layers_seen": 2}
    assert "worst_cell: the worst layer (relative L2, lower is better)." in str(table.caption)
    flat = METRIC.replace('        Column("worst_cell", "cell", "relative L2", "lower", "the worst layer"),\n', "")
    flat = flat.replace('        Column("layers_seen", "cell", "layers", "none", "how many layers there were"),\n', "")
    word = own(flat.partition("    def combine")[0])
    said = [str(part) for part in replay_table(replay(TINY, ["knorm"], metrics=[word], **CUT))[1:]]
    assert f"{word} has no number per cell: see --json or -o." in said


def test_a_cell_without_effect_has_no_score(own: Callable[[str], str]) -> None:
    result = replay(TINY, ["knorm"], metrics=[own(METRIC)], budgets=[4000], layers=[0], sequences=[0])
    cell = next(c for c in result.entries("cells") if c["sequence"] is None and c["policy"] == "knorm")
    assert (cell["no_effect"], cell["worst_cell"], cell["layers_seen"]) == (True, None, 1)


WRONG = [
    ('"worst_tokens", "head"', '"evicted_mass", "head"', "evicted_mass, which is a column of a built-in metric"),
    ('"worst_tokens", "head"', '"layer", "head"', "layer, which is a column of another table"),
    ('"worst_tokens", "head"', '"rho", "head"', "rho, which is a column of kvtool's tables"),
    ('"worst_tokens", "head"', '"predicted_kl_w8", "head"', "of a family that kvtool has"),
    ('"worst_tokens", "head"', '"policy", "head"', "policy, which is a key column"),
    ('"worst_tokens", "head"', '"Worst Tokens", "head"', "lower-case letters"),
    ('"worst_layer", "layer"', '"worst_layer", "kv_head"', "level 'kv_head'"),
    ('"relative L2", "lower", "the worst step"', '"", "lower", "the worst step"', "without a unit"),
    ('"lower", "the worst step"', '"down", "the worst step"', "direction 'down'"),
    ("version = 3", "version = '3'", "version '3'"),
    ('name = "worst"', 'name = "layer_error"', "layer_error, which is kvtool's own"),
    ('name = "worst"', 'name = "counts"', "counts, which is kvtool's own"),
    ('name = "worst"', 'name = "a/b"', "the name 'a/b'"),
    ('"worst_tokens": heads, ', "", "without its column worst_tokens"),
    ('"worst_tokens": heads', '"worst_tokens": heads[:1]', "worst_tokens as [1] float64, expected [4]"),
    ('"worst_layer": heads.max()', '"worst_layer": heads', "worst_layer as [4] float64, expected []"),
    ('"worst_tokens": heads', '"worst_tokens": heads > 0', "worst_tokens as [4] bool"),
    ('"worst_tokens": heads', '"worst_tokens": heads.to(torch.bfloat16)', "bfloat16, which cannot be kept"),
    ('"worst_tokens": heads', '"worst_tokens": heads, "a/b": heads', "stores 'a/b'"),
    ('"worst_tokens": heads', '"worst_tokens": heads.tolist()', "no dictionary of tensors"),
    ("errors.squared_error / errors", "errors.squared_error.mul_(2) / errors", "changed what it was shown"),
    *(
        (
            '        return {"worst_tokens"',
            f'        {change}\n        return {{"worst_tokens"',
            "changed what it was shown",
        )
        for change in (
            "retained.evict_step.numpy()[:] = 0",
            "errors.mass.numpy()[:] = 0",
            "errors.future_mass.numpy()[:] = 0",
            "geometry.rotation.inv_freq.numpy()[:] = 0",
            "retained.events[0].ties.numpy()[:] += 1",
            "retained.events[0].diagnostics['mine'] = heads",
            "retained.events.clear()",
            "retained.evict_step.resize_(1)",
            "object.__setattr__(retained, 'events', [])",
        )
    ),
    *(
        (
            '        return {"worst_cell"',
            f'        {change}\n        return {{"worst_cell"',
            "changed what it was shown",
        )
        for change in ("partials[0]['worst_layer'].numpy()[()] = 0", "partials[0]['new'] = None", "partials.reverse()")
    ),
    (
        "    def combine",
        "    def average(self, cells):\n        return {k: cells[0].pop(k) for k in list(cells[0])}\n\n    def combine",
        "changed what it was shown",
    ),
    ('"worst_tokens": heads', '"worst_tokens": heads.to("meta")', "stores worst_tokens as a tensor without data"),
    ('"worst_tokens": heads', '"worst_tokens": heads.to_sparse()', "stores worst_tokens as torch.sparse_coo, which"),
    (
        '"worst_tokens": heads',
        '"odd": heads.as_subclass(type("Odd", (torch.Tensor,), {"cpu": None})), "worst_tokens": heads',
        "'NoneType' object is not callable (storing odd, layer ",
    ),
    ('"worst_tokens": heads', '"a\\0b": heads, "worst_tokens": heads', "stores 'a\\x00b'"),
    ('"worst_tokens": heads', '"\\ud800": heads, "worst_tokens": heads', "stores '\\ud800'"),
    ('"worst_tokens": heads', '"n" * 101: heads, "worst_tokens": heads', "of at most 100 letters"),
    ('"layers_seen": len(partials)', '"layers_seen": 10**400', "int too large to convert to float"),
    (
        "    def combine",
        "    @property\n    def version(self):\n        1 / 0\n\n    def combine",
        "does not say its name",
    ),
    ('"relative L2", "lower", "the worst step"', 'object(), "lower", "the worst step"', "without a unit"),
    ('"relative L2", "lower", "the worst step"', '"L2", "lower", "worst\\nstep"', "without a unit or a meaning"),
    ('"lower", "the worst step"', '"lower", "the worst step", share=1', "with share 1"),
    ('"worst_tokens", "head"', '"center", "head"', "center, which is a column of another table"),
    ('"worst_tokens", "head"', '"capacity_mc_unit", "head"', "a column of another table"),
    ('name = "worst"', 'name = "mean_layer_error"', "calls itself mean_layer_error, which is a column of"),
    ('name = "worst"', 'name = "kept"', "calls itself kept, which is a column of kvtool's tables"),
    ('name = "worst"', 'name = "measured_worst"', "calls itself measured_worst, which is of a family"),
    (
        "    )\n\n    def partial",
        '        Column("part", "head", "nats", "none", "a share", share=True),\n'
        '        Column("part", "layer", "nats", "none", "a share", share=True),\n    )\n\n'
        "    def shares(self, partials):\n        return {'part': [torch.zeros(3) for _ in partials]}\n\n"
        "    def partial",
        "shares out part as [3, 3] numbers, expected [4, 4]",
    ),
    ('return {"worst_tokens"', 'raise RuntimeError("out of\\nluck")\n        return {"worst_tokens"', "out of luck"),
    (
        '"worst_cell": max(',
        '"best_cell": max(',
        "best_cell, layers_seen from combine, expected",
    ),
    ('max(float(p["worst_layer"])', 'max(p["worst_layer"]', "worst_cell from combine as Tensor"),
    ("    def combine", "    def shares(self, partials):\n        return {'x': []}\n\n    def combine", "shares out x"),
    ("    def combine", "    def average(self, cells):\n        return {}\n\n    def combine", "nothing from average"),
    (
        '        Column("worst_layer", "layer", "relative L2", "lower", "the worst head"),',
        '        Column("worst_layer", "layer", "relative L2", "lower", "the worst head"),\n'
        '        Column("part", "head", "nats", "none", "a share", share=True),',
        "a share part, which is to be declared at head and at layer level",
    ),
]


@pytest.mark.parametrize(("old", "new", "said"), WRONG)
def test_a_metric_that_is_wrong_is_refused_before_anything_is_written(
    install: Install, tmp_path: Path, old: str, new: str, said: str
) -> None:
    assert METRIC.count(old) == 1
    source = METRIC.replace(old, new)
    install("bad-ways", "0.9", metrics={"worst": "measures_wrong:Worst"}, measures_wrong=source)
    with pytest.raises(KvtoolError) as caught:
        replay(TINY, ["knorm"], metrics=["worst"], output=tmp_path / "out", **CUT)
    assert caught.value.code == "metric-broken"
    assert "worst of package bad-ways 0.9" in caught.value.message
    assert said in caught.value.message
    assert "\n" not in caught.value.message
    assert not (tmp_path / "out").exists()


def test_a_metric_that_fails_on_the_trace_only_names_layer_and_sequence(own: Callable[[str], str]) -> None:
    late = METRIC.replace(
        'return {"worst_tokens"', 'if geometry.layer == 5:\n            1 / 0\n        return {"worst_tokens"'
    )
    with pytest.raises(KvtoolError, match=r"failed: ZeroDivisionError: division by zero \(layer 5, sequence 1\)"):
        replay(TINY, ["knorm"], metrics=[own(late)], sequences=[1], ratios=["0.5"])
    apart = METRIC.replace('{"worst_cell"', '{} if float(partials[0]["worst_layer"]) == 0 else {"worst_cell"')
    with pytest.raises(KvtoolError, match=r"nothing from combine.*\(layers put together, sequence 0\)"):
        replay(TINY, ["knorm"], metrics=[own(apart, "apart")], **CUT)


def test_metrics_that_share_a_name_or_a_column_are_not_asked_for_together(
    install: Install, own: Callable[[str, str], str]
) -> None:
    install("new-ways", "2.5", metrics={"worst": "measures_c:Worst"}, measures_c=METRIC)
    with pytest.raises(KvtoolError, match="have one name, worst"):
        replay(TINY, ["knorm"], metrics=["worst", "worst:times=2"], **CUT)
    renamed = own(METRIC.replace('name = "worst"', 'name = "worst_too"'), "renamed")
    with pytest.raises(KvtoolError, match=r"new-ways 2\.5 both have a column"):
        replay(TINY, ["knorm"], metrics=["worst", renamed], **CUT)
    twice = replay(TINY, ["knorm"], metrics=["worst", "worst:times=1"], **CUT)
    assert len(twice.manifest["replay"]["metrics"]) == 1


@pytest.mark.parametrize("trace", ["tiny-gqa", "smollm2-gradients"])
def test_every_column_that_replay_writes_is_taken(trace: str) -> None:
    known = taken()
    budget: dict[str, Any] = {"budgets": [40], "schedules": ["every:8"]}
    if trace == "smollm2-gradients":
        budget = {"ratios": ["0.5"], "decompose": True, "samples": 2, "horizon": 8, "token_shares": True}
    path = TINY.with_name(f"{trace}.zarr")
    result = replay(path, ["jacap", "snapkv"], layers=[0], sinks=1, window=8, telemetry=True, **budget)
    assert trace == "tiny-gqa" or {"decomposition", "ladder", "token_shares", "telemetry"} <= set(result.tables)
    for name, table in result.tables.items():
        free = [c for c in table.column_names if c not in known and not c.startswith(FAMILIES)]
        assert free == [], name


def test_a_package_must_call_its_metric_as_it_calls_itself(install: Install) -> None:
    install("new-ways", "2.5", metrics={"other": "measures_d:Worst"}, measures_d=METRIC)
    with pytest.raises(KvtoolError, match="both names must be one") as caught:
        replay(TINY, ["knorm"], metrics=["other"], **CUT)
    assert caught.value.code == "metric-broken"


def test_a_policy_may_not_diagnose_what_a_metric_measures(own: Callable[[str, str], str], tmp_path: Path) -> None:
    talks = POLICY + (
        "\n    def diagnose(self, state, view):\n        return {'worst_tokens': view.values.new_zeros(8)}\n"
    )
    (tmp_path / "talks.py").write_text(talks)
    with pytest.raises(KvtoolError, match="diagnoses worst_tokens, which is a column of a metric") as caught:
        replay(TINY, [f"{tmp_path}/talks.py:Newest"], metrics=[own(METRIC, "own")], **CUT)
    assert caught.value.code == "policy-broken"


def test_words_that_name_no_metric(own: Callable[[str], str], capfd: pytest.CaptureFixture[str]) -> None:
    word = own(METRIC)
    cases = [
        ("layer_eror", "metric-unknown", "did you mean layer_error?"),
        ("predicted_kl:windows=8", "usage", "--kl-window"),
        (f"{word}:tims=1", "metric-parameter", "did you mean times?"),
        (f"{word[:-5]}Nothing", "metric-unknown", "no metric dataclass"),
        (f"{Path(word[:-6]).with_name('gone.py')}:X", "file-missing", "does not exist"),
    ]
    for text, code, said in cases:
        assert run(["replay", str(TINY), "-p", "knorm", "--metric", text]) == 2, text
        err = capfd.readouterr().err
        assert f"[{code}]" in err, err
        assert said in err, err
    assert run(["replay", str(TINY), "-p", "knorm", "--layers", "0", "--metric", "layer_error", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["manifest"]["replay"]["metrics"] == []  # it runs always


def test_infinity_and_nan_are_null(own: Callable[[str], str]) -> None:
    source = METRIC.replace('"worst_layer": heads.max()', '"worst_layer": heads.max() * math.nan')
    source = source.replace('max(float(p["worst_layer"]) for p in partials)', "math.inf").replace(
        "import torch", "import math\nimport torch"
    )
    result = replay(TINY, ["knorm"], metrics=[own(source)], **CUT)
    assert {entry["worst_layer"] for entry in result.entries("layers")} == {None}
    assert {entry["worst_cell"] for entry in result.entries("cells")} == {None}
    assert all(math.isfinite(row["worst_tokens"]) for row in result.entries("rows"))


def test_a_metric_that_writes_late_reaches_nobody(own: Callable[[str], str]) -> None:
    plain = replay(TINY, ["knorm"], **CUT)
    late = METRIC.replace(
        'return {"worst_tokens"',
        'if geometry.layer == 5:\n            retained.evict_step.numpy()[:] = 0\n        return {"worst_tokens"',
    )
    with pytest.raises(KvtoolError, match=r"changed what it was shown: work on a copy \(layer 5, sequence 0\)"):
        replay(TINY, ["knorm"], metrics=[own(late)], **CUT)
    again = replay(TINY, ["knorm"], **CUT)
    assert again.tables["evict_steps"].equals(plain.tables["evict_steps"])


def test_a_buffer_that_is_used_again_keeps_no_numbers_of_another_layer(own: Callable[[str, str], str]) -> None:
    source = METRIC.replace("@dataclass", "BUFFER = torch.zeros(9, dtype=torch.float64)\n\n@dataclass")
    again = source.replace(
        'return {"worst_tokens": heads, "worst_layer": heads.max()}',
        "mine = BUFFER[: len(heads)].copy_(heads)\n        BUFFER[8] = heads.max()\n        "
        'return {"worst_tokens": mine, "odd": mine[::2].expand(3, -1), "worst_layer": BUFFER[8]}',
    )
    assert again.count("BUFFER") == 4
    fine, reused = (
        replay(TINY, ["knorm"], metrics=[own(text, name)], **CUT).tables
        for name, text in (("fine", METRIC), ("reused", again))
    )
    assert reused["rows"]["worst_tokens"].equals(fine["rows"]["worst_tokens"])
    assert reused["cells"]["worst_cell"].equals(fine["cells"]["worst_cell"])  # the worst layer is not the last one


def test_whole_numbers_beyond_float64_are_rounded(own: Callable[[str], str], tmp_path: Path) -> None:
    source = METRIC.replace('"worst_layer": heads.max()', '"worst_layer": torch.tensor(2**53 + 1)')
    source = source.replace('"layers_seen": len(partials)', '"layers_seen": 2**60 + 1')
    result = replay(TINY, ["knorm"], metrics=[own(source)], output=tmp_path / "out", **CUT)
    assert {entry["worst_layer"] for entry in result.entries("layers")} == {2.0**53}
    assert {entry["layers_seen"] for entry in result.entries("cells")} <= {2.0**60, None}


def test_the_typing_of_a_column_is_for_its_own_tables(own: Callable[[str], str]) -> None:
    entries = [{"worst_cell": "a word"}]
    assert table_of("decomposition", entries, ("worst_cell",)).schema.field("worst_cell").type == pa.string()
    result = replay(TINY, ["knorm"], metrics=[own(METRIC)], decompose=True, samples=0, horizon=4, **CUT)
    assert result.tables["decomposition"].schema.field("center").type == pa.string()
    assert result.tables["cells"].schema.field("layers_seen").type == pa.float64()


def test_a_metric_called_as_another_ones_column_is_not_asked_for_beside_it(own: Callable[[str, str], str]) -> None:
    other = METRIC.replace('name = "worst"', 'name = "worst_layer"')
    for old in ("worst_tokens", "worst_cell", "layers_seen"):
        other = other.replace(old, f"{old}_too")
    other = other.replace('"worst_layer", "layer"', '"worst_layer_too", "layer"').replace(
        '"worst_layer": heads', '"worst_layer_too": heads'
    )
    other = other.replace('p["worst_layer"]', 'p["worst_layer_too"]')
    words = [own(METRIC, "one"), own(other, "other")]
    with pytest.raises(KvtoolError, match=r"called as a column of metric .*one\.py:Worst, worst_layer"):
        replay(TINY, ["knorm"], metrics=words, **CUT)
    assert replay(TINY, ["knorm"], metrics=words[1:], **CUT).tables["cells"]
