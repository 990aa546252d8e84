"""Replay from trace to result: every number against a plain loop, and the promises about files and order."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtool.errors import KvtoolError
from kvtool.manifest import canonical_json
from kvtool.replay import replay
from kvtool.replay.unit import run_unit
from kvtool.result import Result
from kvtool.trace import open_trace

SAMPLES = Path(__file__).resolve().parents[2] / "sample_traces"
TINY = SAMPLES / "tiny-gqa.zarr"
POLICIES = ["snapkv:window=8", "h2o", "knorm", "oracle-mass"]


@pytest.fixture(scope="module")
def result() -> Result:
    return replay(TINY, POLICIES, ratios=["0.5", "0.75"], window=8, precision="float64")


def naive_outputs(layer: Any, evict: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """f_V and f_R [H, Dv] at one step, token by token in float64."""
    geometry = layer.geometry
    at = int((layer.query_steps == step).nonzero())
    full = torch.zeros(geometry.query_heads, geometry.value_dim, dtype=torch.float64)
    left = torch.zeros_like(full)
    for head in range(geometry.query_heads):
        kv = head // geometry.group
        for into, keep_all in ((full, True), (left, False)):
            total = 0.0 if geometry.sink_logits is None else math.exp(float(geometry.sink_logits[head]))
            summed = torch.zeros(geometry.value_dim, dtype=torch.float64)
            for token in range(step + 1):
                if geometry.window is not None and step - token >= geometry.window:
                    continue
                if not keep_all and not step < int(evict[kv, token]):
                    continue
                weight = math.exp(geometry.scale * float(layer.queries[head, at] @ layer.keys[kv, token]))
                total += weight
                summed += weight * layer.values[kv, token]
            into[head] = summed / total if total else summed
    return full, left


@pytest.mark.parametrize("layer_id", [0, 3, 5])
def test_errors_equal_a_loop_over_tokens(result: Result, layer_id: int) -> None:
    sequence = open_trace(TINY).sequences[1]
    layer = sequence.layer(layer_id, dtype=torch.float64)
    arrays = [
        e
        for e in result.entries("evict_steps")
        if (e["sequence"], e["layer"], e["policy"], e["ratio"]) == (1, layer_id, "knorm", 0.75)
    ]
    evict = torch.tensor([e["evict_step"] for e in sorted(arrays, key=lambda e: e["kv_head"])])
    errors, outputs = [], []
    for step in range(128, 160):
        full, left = naive_outputs(layer, evict, step)
        errors.append(full - left)
        outputs.append(full)
    e, f = torch.stack(errors), torch.stack(outputs)  # [n, H, Dv]
    expected = (e.square().sum((0, 2)) / f.square().sum((0, 2))).sqrt()
    rows = {
        r["q_head"]: r
        for r in result.entries("rows")
        if (r["sequence"], r["layer"], r["policy"], r["ratio"]) == (1, layer_id, "knorm", 0.75)
    }
    assert [rows[h]["output_error"] for h in range(8)] == pytest.approx(expected.tolist(), rel=1e-11)
    worst = (e.norm(dim=2) / f.norm(dim=2)).max(0).values
    assert [rows[h]["output_error_max"] for h in range(8)] == pytest.approx(worst.tolist(), rel=1e-11)
    assert all(rows[h]["kv_head"] == h // 4 for h in range(8))
    projection = layer.output_projection
    assert projection is not None
    oe, of = (torch.einsum("nhd,hdm->nm", x, projection) for x in (e, f))
    layer_error = float((oe.square().sum() / of.square().sum()).sqrt())
    (entry,) = (
        x
        for x in result.entries("layers")
        if (x["sequence"], x["layer"], x["policy"], x["ratio"]) == (1, layer_id, "knorm", 0.75)
    )
    assert entry["layer_error"] == pytest.approx(layer_error, rel=1e-11)


def test_cells_are_means_of_what_is_below_them(result: Result) -> None:
    layers, rows = result.entries("layers"), result.entries("rows")
    for cell in result.entries("cells"):
        same = [
            x
            for x in layers
            if (x["policy"], x["ratio"]) == (cell["policy"], cell["ratio"])
            and cell["sequence"] in (None, x["sequence"])
        ]
        heads = [
            x
            for x in rows
            if (x["policy"], x["ratio"]) == (cell["policy"], cell["ratio"])
            and cell["sequence"] in (None, x["sequence"])
        ]
        assert len(same) == (6 if cell["sequence"] is None else 3)
        mean = math.fsum(x["layer_error"] for x in same) / len(same)
        assert cell["mean_layer_error"] == pytest.approx(mean, abs=1e-13)
        mean = math.fsum(x["output_error"] for x in heads) / len(heads)
        assert cell["mean_output_error"] == pytest.approx(mean, abs=1e-13)
        assert cell["ties"] == sum(x["ties"] for x in same)


def test_full_is_exactly_zero_and_controls_always_run(result: Result) -> None:
    full = [c for c in result.entries("cells") if c["policy"] == "full"]
    assert len(full) == 2 * 3
    assert all(c["mean_layer_error"] == 0.0 and c["mean_output_error"] == 0.0 for c in full)
    assert {c["policy"] for c in result.entries("cells")} == {*POLICIES, "full", "random"}
    for row in result.entries("rows"):
        if row["policy"] == "full":
            assert row["output_error"] == row["output_error_max"] == row["evicted_mass"] == 0.0
            assert row["direction_gap"] is None


def test_budget_beyond_the_pool_is_exactly_zero_for_every_policy() -> None:
    result = replay(TINY, ["all"], budgets=[128])
    assert all(row["output_error"] == 0.0 for row in result.entries("rows"))
    assert all(set(e["evict_step"]) == {160} for e in result.entries("evict_steps"))
    assert any("had no effect" in warning for warning in result.warnings)


def test_no_policy_keeps_more_future_mass_than_the_mass_oracle(result: Result) -> None:
    regrets = [(r["policy"], r["mass_regret"]) for r in result.entries("rows")]
    assert all(regret >= 1.0 for _, regret in regrets if regret is not None)
    assert {regret for policy, regret in regrets if policy == "oracle-mass"} == {1.0}
    assert {regret for policy, regret in regrets if policy in ("h2o", "full")} == {None}
    masses: dict[tuple, float] = {}
    for row in result.entries("rows"):
        key = row["policy"], row["ratio"], row["sequence"], row["layer"], row["kv_head"]
        masses[key] = masses.get(key, 0.0) + row["evicted_mass"]
    for (policy, ratio, *place), mass in masses.items():
        if policy != "full":
            assert masses["oracle-mass", ratio, *place] <= mass + 1e-12


def test_keys_name_each_entry_once(result: Result) -> None:
    for table, place in (("cells", ()), ("layers", ("layer",)), ("rows", ("layer", "q_head"))):
        keys = [tuple(e[k] for k in ("sequence", "policy", "ratio", *place)) for e in result.entries(table)]
        assert len(keys) == len(set(keys))
        assert all(e["event"] is None for e in result.entries(table))
        assert all(e["evaluate"] == "live" and e["schedule"] == "prompt-end" for e in result.entries(table))
    assert {e["event"] for e in result.entries("evict_steps")} == {128}
    assert {e["event"] for e in result.entries("ages")} == {128, None}


def test_achieved_is_what_the_arrays_hold(result: Result) -> None:
    for entry in result.entries("evict_steps"):
        kept = sum(step == 160 for step in entry["evict_step"][:128])
        pool = 47 if entry["layer"] == 5 else 128
        outside = 128 - pool  # rows that left the window are never evicted
        expected = pool if entry["policy"] == "full" else pool - math.floor(entry["ratio"] * pool)
        assert kept - outside == entry["achieved"] == expected


def test_json_has_no_nan_and_survives_a_round_trip(result: Result, tmp_path: Path) -> None:
    document = result.document()
    text = json.dumps(document, allow_nan=False)
    assert json.loads(text)["schema"] == "kvtool.replay/1"
    result.save(tmp_path / "r")
    again = Result.load(tmp_path / "r")
    assert canonical_json(again.document()) == canonical_json(document)
    assert again.tables["evict_steps"].equals(result.tables["evict_steps"])


def test_live_and_pool_differ_and_say_so() -> None:
    pool = replay(TINY, ["knorm"], ratios=["0.5"], evaluate="pool", window=8)
    live = replay(TINY, ["knorm"], ratios=["0.5"], evaluate="live", window=8)
    assert {c["evaluate"] for c in pool.entries("cells")} == {"pool"}
    by_mode = [
        [c["mean_layer_error"] for c in r.entries("cells") if c["policy"] == "knorm" and c["sequence"] is None]
        for r in (pool, live)
    ]
    assert by_mode[0] != by_mode[1]
    steps = [[e["evict_step"] for e in r.entries("evict_steps")] for r in (pool, live)]
    assert steps[0] == steps[1]


def test_sequences_do_not_leak_into_each_other() -> None:
    def rows_of(result: Result, sequence: int) -> str:
        return canonical_json(
            [
                {k: v for k, v in e.items() if k != "sequence"}
                for table in ("rows", "layers", "ages", "evict_steps")
                for e in result.entries(table)
                if e["sequence"] == sequence
            ]
        )

    both = replay(TINY, ["all"], ratios=["0.6"], window=8)
    alone = replay(TINY, ["all"], ratios=["0.6"], window=8, sequences=[1])
    assert rows_of(both, 1) == rows_of(alone, 1)
    assert rows_of(both, 0) != rows_of(both, 1)


def test_results_are_never_overwritten_without_force(tmp_path: Path) -> None:
    out = tmp_path / "results"
    replay(TINY, ["knorm"], ratios=["0.5"], layers=[0], output=out)
    assert not (out / "parts").exists()
    before = (out / "manifest.json").read_bytes()
    with pytest.raises(KvtoolError, match="already holds a result"):
        replay(TINY, ["knorm"], ratios=["0.9"], layers=[0], output=out)
    assert (out / "manifest.json").read_bytes() == before
    replay(TINY, ["knorm"], ratios=["0.9"], layers=[0], output=out, force=True)
    assert {c["ratio"] for c in Result.load(out).entries("cells")} == {0.9}
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(KvtoolError, match="not empty"):
        replay(TINY, ["knorm"], ratios=["0.9"], output=tmp_path / "mine", force=True)


def test_a_stopped_run_resumes_and_ends_with_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = replay(TINY, ["h2o", "jacap"], ratios=["0.5"], output=tmp_path / "whole")

    class Stop(Exception):
        pass

    def stop_at_third(done: int, total: int, what: str) -> None:
        if done == 3:
            raise Stop

    out = tmp_path / "stopped"
    with pytest.raises(Stop):
        replay(TINY, ["h2o", "jacap"], ratios=["0.5"], output=out, progress=stop_at_third)
    parts = sorted(p.name for p in (out / "parts").iterdir() if p.is_dir())
    assert len(parts) == 3
    with pytest.raises(KvtoolError, match="no finished result"):
        Result.load(out)
    computed: list[tuple[int, int]] = []

    def counted(sequence: Any, layer_id: int, *rest: Any) -> Any:
        computed.append((sequence.index, layer_id))
        return run_unit(sequence, layer_id, *rest)

    monkeypatch.setattr("kvtool.replay.run.run_unit", counted)
    resumed = replay(TINY, ["h2o", "jacap"], ratios=["0.5"], output=out)
    assert computed == [(1, 0), (1, 3), (1, 5)]
    assert canonical_json(resumed.document()["rows"]) == canonical_json(whole.document()["rows"])
    assert canonical_json(resumed.document()["cells"]) == canonical_json(whole.document()["cells"])
    assert resumed.tables["evict_steps"].equals(whole.tables["evict_steps"])
    files = {p.name: p.read_bytes() for p in (tmp_path / "whole").glob("*.parquet")}
    assert len(files) == 5
    assert {p.name: p.read_bytes() for p in out.glob("*.parquet")} == files


def test_other_choices_do_not_reuse_parts(tmp_path: Path) -> None:
    def stop(done: int, total: int, what: str) -> None:
        if done == 2:
            raise KeyboardInterrupt

    out = tmp_path / "r"
    with pytest.raises(KeyboardInterrupt):
        replay(TINY, ["knorm"], ratios=["0.5"], output=out, progress=stop)
    with pytest.raises(KvtoolError, match="with other options"):
        replay(TINY, ["knorm"], ratios=["0.5"], sinks=0, output=out)
    changed = replay(TINY, ["knorm"], ratios=["0.5"], sinks=0, output=out, force=True)
    fresh = replay(TINY, ["knorm"], ratios=["0.5"], sinks=0)
    assert canonical_json(changed.document()["rows"]) == canonical_json(fresh.document()["rows"])


def test_evict_at_moves_the_event() -> None:
    result = replay(TINY, ["knorm"], ratios=["0.5"], evict_at=100, layers=[0])
    assert {e["event"] for e in result.entries("evict_steps")} == {100}
    assert {e["schedule"] for e in result.entries("cells")} == {"at:100"}
    assert {e["candidates"] for e in result.entries("layers")} == {100}


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ({"ratios": ["0.5"], "budgets": [3]}, "usage", "both given"),
        ({"ratios": ["1.5"]}, "usage", "outside"),
        ({"budgets": [0]}, "usage", "keeps no token"),
        ({"evict_at": 160}, "no-queries", "sequence 0"),
        ({"evict_at": 0}, "usage", "no token to evict"),
        ({"layers": [1]}, "usage", "no layer 1"),
        ({"sequences": [7]}, "usage", "no sequence 7"),
        ({"evaluate": "dead"}, "usage", "--evaluate dead"),
        ({"precision": "float16"}, "usage", "--precision"),
        ({"device": "gpu"}, "usage", "unknown"),
        ({"sinks": -1}, "usage", "negative"),
        ({"policies": ["snapkv:kernel=4"]}, "policy-parameter", "kernel"),
    ],
)
def test_bad_choices_are_refused_before_anything_is_written(
    arguments: dict[str, Any], code: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(KvtoolError) as caught:
        replay(TINY, **{"policies": ["knorm"], "output": tmp_path / "out", **arguments})
    assert caught.value.code == code
    assert said in caught.value.message
    assert not (tmp_path / "out").exists()
