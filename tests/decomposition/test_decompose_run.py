"""`--decompose` as a run: refusals, files that resume, seeds, the command line, and what it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtool.cli.main import run
from kvtool.decomposition import Decompose
from kvtool.errors import KvtoolError
from kvtool.manifest import canonical_json
from kvtool.replay import replay
from kvtool.replay import run as run_module
from kvtool.replay.plan import make_plan
from kvtool.result import Result

TINY = Path(__file__).resolve().parents[2] / "sample_traces" / "tiny-gqa.zarr"
QUICK = {"sinks": 1, "window": 2, "decompose": True, "samples": 2, "pool": 6, "keep": 3}
WORDS = ["--sinks", "1", "--window", "2", "--decompose", "--samples", "2", "--pool", "6", "--keep", "3"]


pytestmark = pytest.mark.usefixtures("few_draws")


class Stop(Exception):
    pass


def tables_of(result: Result) -> str:
    return canonical_json([result.entries("decomposition"), result.entries("ladder")])


def test_a_stopped_decomposition_resumes_to_the_same_numbers(
    traced: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = replay(traced(), ["knorm", "jacap"], ratios=["0.5"], **QUICK)

    def stop(done: int, total: int, what: str) -> None:
        if done == 4:
            raise Stop

    out = tmp_path / "r"
    with pytest.raises(Stop):
        replay(traced(), ["knorm", "jacap"], ratios=["0.5"], output=out, progress=stop, **QUICK)
    assert len([p for p in (out / "parts").iterdir() if p.is_dir()]) == 4
    ran = []
    plain = run_module.run_unit
    monkeypatch.setattr(run_module, "run_unit", lambda *args: ran.append(args[1]) or plain(*args))
    resumed = replay(traced(), ["knorm", "jacap"], ratios=["0.5"], output=out, **QUICK)
    assert ran == [1, 2]
    assert tables_of(resumed) == tables_of(whole)
    assert tables_of(Result.load(out)) == tables_of(whole)


@pytest.mark.parametrize(
    "other", [{"center": "past"}, {"horizon": 7}, {"keep": 2}, {"samples": 3}, {"decompose": False}]
)
def test_parts_of_other_options_are_not_reused(traced: Any, tmp_path: Path, other: dict[str, Any]) -> None:
    def stop(done: int, total: int, what: str) -> None:
        if done == 1:
            raise Stop

    out = tmp_path / "r"
    with pytest.raises(Stop):
        replay(traced(), ["knorm"], ratios=["0.5"], output=out, progress=stop, **QUICK)
    chosen = {**QUICK, **other}
    if not chosen["decompose"]:
        chosen = {"sinks": 1, "window": 2}
    with pytest.raises(KvtoolError, match="with other options"):
        replay(traced(), ["knorm"], ratios=["0.5"], output=out, **chosen)
    found = replay(traced(), ["knorm"], ratios=["0.5"], output=out, force=True, **chosen)
    fresh = replay(traced(), ["knorm"], ratios=["0.5"], **chosen)
    assert set(found.tables) == set(fresh.tables)
    for name in found.tables:
        assert canonical_json(found.entries(name)) == canonical_json(fresh.entries(name))


def test_the_ladder_has_one_entry_per_policy_and_kv_head(traced: Any) -> None:
    found = replay(traced(), ["knorm", "jacap"], ratios=["0.5", "0.8"], **QUICK)
    entries = found.entries("ladder")
    assert {e["policy"] for e in entries} == {"knorm", "jacap", "random"}  # full has nothing to choose
    assert len(entries) == 3 * 2 * 3 * 2
    for entry in entries:
        assert (entry["ratio"], entry["budget"], entry["achieved"]) == (None, 3, 3)
        assert (entry["samples"], entry["pool"], entry["event"]) == (2, 6, 34)
        assert entry["ladder_total"] >= 0
        assert entry["damage_gap_greedy"] >= 0


def test_what_is_drawn_depends_on_nothing_else(traced: Any) -> None:
    alone = replay(traced(), ["knorm"], ratios=["0.5"], sequences=[1], layers=[1], **QUICK)
    among = replay(traced(), ["h2o", "knorm"], ratios=["0.8", "0.5"], **QUICK)

    def mine(result: Result, table: str) -> list[dict[str, Any]]:
        wanted = {"sequence": 1, "policy": "knorm", "layer": 1}
        rows = [r for r in result.entries(table) if all(r[k] == v for k, v in wanted.items())]
        return [r for r in rows if r["ratio"] in (None, 0.5)]

    for table in ("decomposition", "ladder"):
        assert mine(alone, table)
        assert mine(alone, table) == mine(among, table)
    asked = alone.manifest["replay"]["decompose"]
    assert (asked["seed"], asked["horizon"], asked["samples"], asked["draws"]) == (0, 512, 2, 10_000)


def test_a_plain_replay_is_untouched_by_a_decomposition(traced: Any) -> None:
    plain = replay(traced(), ["knorm"], ratios=["0.5"], sinks=1, window=2)
    full = replay(traced(), ["knorm"], ratios=["0.5"], **QUICK)
    assert set(full.tables) - set(plain.tables) == {"decomposition", "ladder"}
    for name in plain.tables:
        assert plain.entries(name) == full.entries(name)
    assert plain.manifest["replay"]["decompose"] is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--pool", "24", "--keep", "12"], "2,704,156 subsets a sub-cache"),
        (["--pool", "8", "--keep", "8"], "--keep 8 of --pool 8 leaves nothing to choose"),
        (["--keep", "0"], "--keep 0 of --pool 16 leaves nothing to choose"),
        (["--horizon", "0"], "--horizon 0 leaves no query to evaluate"),
        (["--samples", "-1"], "--samples -1 is below 0"),
        (["--center", "middle"], "--center middle is unknown"),
        (["--pool", "19", "--keep", "2", "--window", "120"], "no layer has more than 4 unprotected candidates"),
        (["--evict-at", "160"], "160"),
    ],
)
def test_bad_input_is_one_sentence(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["replay", str(TINY), "-p", "knorm", "-r", "0.5", "--decompose", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err.splitlines()[0]
    assert "Traceback" not in err


def test_options_that_would_be_ignored_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["replay", str(TINY), "-p", "knorm", "--center", "past"]) == 2
    assert "--center speaks of a decomposition" in capsys.readouterr().err


def test_subsets_at_the_limit_are_allowed_and_without_samples_they_do_not_count() -> None:
    assert Decompose(pool=23, keep=8).subsets == 490_314
    assert Decompose(pool=40, keep=20, samples=0).subsets > 10**11
    with pytest.raises(KvtoolError, match="2,704,156"):
        Decompose(pool=24, keep=12)


def test_a_centre_that_the_trace_cannot_serve_is_refused(traced: Any) -> None:
    late = traced(first_query=20)
    with pytest.raises(KvtoolError, match="holds 14 of the 30 queries before the event") as caught:
        replay(late, ["knorm"], ratios=["0.5"], **QUICK)
    assert caught.value.code == "trace-lacks"
    assert replay(late, ["knorm"], ratios=["0.5"], center="future", **QUICK).entries("decomposition")


def test_layers_without_enough_tokens_are_named(traced: Any) -> None:
    chosen = {**QUICK, "pool": 30, "keep": 2}
    found = replay(traced(), ["knorm"], ratios=["0.5"], **chosen)
    assert "no exact search in layers 1: fewer than 30 unprotected candidates to draw from" in found.warnings
    assert {entry["layer"] for entry in found.entries("ladder")} == {0, 2}
    assert {entry["layer"] for entry in found.entries("decomposition")} == {0, 1, 2}


def test_the_cost_is_stated_before_it_runs(traced: Any) -> None:
    said: list[str] = []

    def progress(done: int, total: int, what: str) -> None:
        said.append(what)

    replay(traced(), ["knorm"], ratios=["0.5"], progress=progress, note=said.append, **QUICK)
    assert said[0].startswith(
        "decomposing 3 cells x 24 query heads x up to 19 queries, and exact search over 20 subsets in each of 24 "
        "sub-caches: roughly "
    )
    assert said[0].endswith(" times the work of the replay alone")
    assert any("decomposing KV head 1, cell 3 of 3" in what for what in said)
    assert any("searching KV head 0" in what for what in said)


def test_the_command_says_the_same_as_the_function(traced: Any, capsys: pytest.CaptureFixture[str]) -> None:
    trace = str(traced())
    assert run(["replay", trace, "-p", "knorm", "-r", "0.5", *WORDS, "--json"]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    found = replay(trace, ["knorm"], ratios=["0.5"], **QUICK)
    assert document["decomposition"] == json.loads(json.dumps(found.entries("decomposition")))
    assert document["ladder"] == json.loads(json.dumps(found.entries("ladder")))
    assert "note: decomposing 3 cells" in err
    assert run(["replay", trace, "-p", "knorm", "-r", "0.5", *WORDS]) == 0
    text = capsys.readouterr().out
    assert "largest error of knorm" in text
    assert "regret on 2 sub-caches per KV head: 3 of 6 tokens kept" in text


def test_several_events_are_refused(traced: Any) -> None:
    from dataclasses import replace

    from kvtool.replay.decide import decide
    from kvtool.replay.decompose import decompose_unit
    from kvtool.trace import open_trace

    plan = make_plan(["knorm"], ratios=["0.5"], controls=False, decompose=Decompose(samples=0))
    layer = open_trace(traced()).sequences[0].layer(0, dtype=torch.float64)
    label, policy = plan.policies[0]
    (once,) = decide(layer, label, policy, plan.budgets, 34, plan.protection, torch.arange(34, 53))
    twice = replace(once, events=once.events * 2)
    with pytest.raises(KvtoolError, match="speaks of one event"):
        decompose_unit(0, layer, layer, plan, 34, [twice], lambda what: None)


def test_the_package_never_imports_replay() -> None:
    import ast

    folder = Path(run_module.__file__).parents[1] / "decomposition"
    imported = [
        node.module or ""
        for path in folder.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom)
    ]
    assert imported
    assert [name for name in imported if name.startswith(("kvtool.replay", "kvtool.trace"))] == []
