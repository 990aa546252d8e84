"""`--device`: refused in one sentence where there is no card; on Triton's interpreter, a whole replay as on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import kvtool
from kvtool.cli.main import run
from kvtool.errors import KvtoolError
from kvtool.kernels.device import Card
from kvtool.replay.order import Bench, Order
from kvtool.replay.parts import Part, Store
from kvtool.replay.plan import make_plan
from kvtool.trace import open_trace

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "sample_traces" / "tiny-gqa.zarr"


@pytest.fixture
def _no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("_no_card")
@pytest.mark.parametrize(("word", "code"), [("cuda", "device"), ("cud", "usage"), ("interpreter", "usage")])
def test_a_device_that_is_not_here_is_one_sentence(
    word: str, code: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "results"
    assert run(["replay", str(TINY), "-p", "knorm", "--device", word, "-o", str(output)]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith(f"error: --device {word}")
    assert f"[{code}]" in told.err
    assert "Traceback" not in told.err
    assert not output.exists()


@pytest.mark.usefixtures("_no_card")
def test_auto_is_the_cpu_without_a_card() -> None:
    result = kvtool.replay(TINY, ["knorm"], ratios=["0.5"], layers=[0], device="auto")
    assert result.manifest["device"] == "cpu"
    assert result.manifest["card"] is None
    assert result.manifest["kernels"] == "reference (torch)"


@pytest.mark.usefixtures("_no_card")
def test_workers_use_the_device_that_was_found_here(tmp_path: Path) -> None:
    result = kvtool.replay(TINY, ["knorm"], ratios=["0.5"], layers=[0], device="auto", workers=1)
    assert (result.manifest["device"], result.manifest["card"]) == ("cpu", None)
    # What `auto` would mean elsewhere does not matter: a worker is told what it meant here.
    trace, asked = open_trace(TINY), {"policies": ["knorm"], "ratios": ["0.5"]}
    plan = make_plan(**asked)  # type: ignore[arg-type]
    for word in ("auto", "cpu"):
        assert Order.of(trace, plan, {**asked, "device": word}, tmp_path).asked["device"] == "cpu"
    on = replace(plan, card=Card("cuda", "H200", "cuda"))
    order = Order.of(trace, on, {**asked, "device": "auto"}, tmp_path)
    assert order.asked["device"] == "cuda"
    with pytest.raises(KvtoolError, match=r"a worker on .* lacks the card: --device cuda: ") as caught:
        Bench(order)
    assert caught.value.code == "worker-differs"


def test_parts_of_another_device_are_another_run_s(tmp_path: Path) -> None:
    plan, trace = make_plan(["knorm"], ratios=["0.5"]), open_trace(TINY)
    on = [replace(plan, card=Card("cuda", name, "cuda")) for name in ("H200", "A100")]
    identities = [one.identity(trace) for one in (plan, *on)]
    assert len({json.dumps(one, sort_keys=True) for one in identities}) == 3
    store = Store(tmp_path / "results", force=False)
    store.open(identities[0])
    store.save("a", "b", Part({name: [] for name in ("layers", "rows", "ages", "evict_steps")}, []))
    store.close(finished=False)
    with pytest.raises(KvtoolError, match="unfinished work"):
        Store(tmp_path / "results", force=False).open(identities[1])


def test_a_part_remembers_what_ran(tmp_path: Path) -> None:
    counts = {"leverage": {"triton": 2, "cpu": 1, "reasons": {"why": 1}}}
    store = Store(tmp_path / "results", force=False)
    store.open("run")
    tables: dict[str, Any] = {name: [] for name in ("layers", "rows", "ages", "evict_steps")}
    store.save("a", "b", Part(tables, [], kernels=counts))
    known = store.load("a", "b")
    store.close(finished=False)
    assert known is not None
    assert known.kernels == counts


CODE = """
import json, sys, torch
torch.set_num_threads(1)
import kvtool
asked, told, answers = json.loads(sys.argv[1]), [], []
for device in ("interpreter", "cpu"):
    result = kvtool.replay(sys.argv[2], device=device, note=told.append, **asked)
    manifest = {name: result.manifest[name] for name in ("device", "card", "kernels")}
    answers.append({"manifest": manifest, "tables": {name: t.to_pylist() for name, t in result.tables.items()}})
print("answer: " + json.dumps({"answers": answers, "told": told}))
"""


def both_devices(**asked: Any) -> dict[str, Any]:
    """The same replay through the Triton doors under the interpreter, and on the CPU."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", CODE, json.dumps(asked), str(TINY)]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(next(x for x in done.stdout.splitlines() if x.startswith("answer: "))[8:])
    return found


def expect_same(ours: Any, theirs: Any, tolerance: float, where: str) -> None:
    """Equal words, whole numbers and nulls; numbers within the tolerance."""
    if isinstance(theirs, list):
        assert len(ours) == len(theirs), where
        for one, other in zip(ours, theirs, strict=True):
            expect_same(one, other, tolerance, where)
    elif isinstance(theirs, float) and isinstance(ours, float):
        assert ours == pytest.approx(theirs, rel=tolerance, abs=tolerance, nan_ok=True), where
    else:
        assert ours == theirs, where


def expect_same_tables(answers: list[dict[str, Any]], tolerance: float) -> None:
    card, cpu = (answer["tables"] for answer in answers)
    assert card.keys() == cpu.keys()
    for name, rows in cpu.items():
        assert len(card[name]) == len(rows) > 0
        for ours, theirs in zip(card[name], rows, strict=True):
            for column, value in theirs.items():
                expect_same(ours[column], value, tolerance, f"{name}.{column}")


def test_a_whole_replay_keeps_the_same_sets_and_numbers_through_the_triton_doors() -> None:
    found = both_devices(policies=["capkv", "snapkv"], ratios=["0.5"], layers=[0], sequences=[0])
    expect_same_tables(found["answers"], 1e-5)
    card, cpu = (answer["manifest"] for answer in found["answers"])
    assert (card["device"], card["card"]) == ("interpreter", "Triton's interpreter")
    assert (cpu["device"], cpu["card"], cpu["kernels"]) == ("cpu", None, "reference (torch)")
    assert card["kernels"]["leverage"]["triton"] > 0
    assert card["kernels"]["attention_mass"]["triton"] > 0
    (said,) = found["told"]
    assert said.startswith("Triton's interpreter: attention_mass ")


def test_a_decomposition_uses_the_float64_tangent() -> None:
    found = both_devices(
        policies=["knorm"], ratios=["0.5"], layers=[3], sequences=[0], decompose=True, samples=0, horizon=4
    )
    checks = ("identity_residual", "tangent_residual")  # rounding itself, so they differ
    for answer in found["answers"]:
        for row in answer["tables"]["decomposition"]:
            assert all(row[name] < 1e-5 for name in checks)
            row.update(dict.fromkeys(checks))
    expect_same_tables(found["answers"], 1e-5)
    kernels = found["answers"][0]["manifest"]["kernels"]["tangent"]
    assert kernels["triton"] > 0
    assert kernels["reasons"] == {"attend has no Triton version": kernels["cpu"]}


def test_float64_leaves_float32_kernels_out() -> None:
    found = both_devices(policies=["capkv", "snapkv"], ratios=["0.5"], layers=[0], precision="float64")
    expect_same_tables(found["answers"], 0.0)
    for name in ("leverage", "attention_mass"):
        counts = found["answers"][0]["manifest"]["kernels"][name]
        assert counts["triton"] == 0
        assert counts["reasons"] == {"float64 was asked for, and the kernel is float32": counts["cpu"]}
