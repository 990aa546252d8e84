"""What is said of memory before a run, against what runs really take, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvtool.errors import KvtoolError
from kvtool.replay.memory import Machine, gathered_bytes, stated_memory, unit_bytes
from kvtool.replay.plan import make_plan
from kvtool.replay.work import work_of
from kvtool.trace import open_trace

HERE = Path(__file__).resolve().parent
TINY = HERE.parents[1] / "sample_traces" / "tiny-gqa.zarr"
POLICIES = ["streaming-llm", "knorm", "keydiff", "tova", "snapkv", "lagkv", "expected-attention", "capkv"]


# The second is a layer of Llama 3 at 32k tokens, all 32 query heads. With 512 evaluated steps, the shape in
# docs/scaling.md, it takes as much memory and twice the time: `python tests/replay/long_layer.py` replays that one.
@pytest.mark.parametrize(("shape", "most"), [("4096 128 8 2 64 1", 0.8e9), ("32768 64 32 8 128 1", 1.5e9)])
def test_a_run_stays_within_what_was_said_of_it(shape: str, most: float, tmp_path: Path) -> None:
    path = tmp_path / "long.zarr"
    script = [sys.executable, str(HERE / "long_layer.py")]
    subprocess.run([*script, "write", str(path), *shape.split()], check=True)
    done = subprocess.run([*script, "replay", str(path), *POLICIES], check=True, capture_output=True, text=True)
    peak = int(done.stdout.split(" peak ")[-1].split()[0])
    plan = make_plan(POLICIES, ratios=["0.5", "0.7", "0.8", "0.9", "0.95"])
    ((sequence, layer_id, step),) = work_of(open_trace(path), plan, None, None)
    stated = unit_bytes(sequence, layer_id, plan, step)
    assert 0.4 * stated <= peak <= stated
    assert peak < most


def test_layers_are_let_go_one_after_another(tmp_path: Path) -> None:
    path = tmp_path / "deep.zarr"
    script = [sys.executable, str(HERE / "long_layer.py")]
    subprocess.run([*script, "write", str(path), *["4096", "64", "16", "4", "64", "12"]], check=True)
    done = subprocess.run([*script, "replay", str(path), "snapkv"], check=True, capture_output=True, text=True)
    peaks = [float(line.split()[-2]) for line in done.stdout.splitlines() if line.endswith("GB")]
    assert len(peaks) == 12
    # A layer's arrays in float32 are 26 MB: kept, they would be 208 MB after eight more layers. The first few layers
    # find their place in the heap.
    assert peaks[-1] - peaks[3] < 0.08


def test_more_than_the_machine_has_is_refused_naming_what_fits() -> None:
    plan = make_plan(["knorm"], ratios=["0.5"])
    work = work_of(open_trace(TINY), plan, None, None)
    each = max(unit_bytes(sequence, layer_id, plan, step) for sequence, layer_id, step in work)
    roomy = stated_memory(plan, work, 4, Machine(10 * each, 10 * each))
    assert roomy.startswith(f"4 workers need up to {4 * each / 1e9:.1f} GB")
    assert roomy.endswith("are free")
    busy = stated_memory(plan, work, 4, Machine(10 * each, 3 * each))
    assert busy.endswith("and --workers 3 would take less")
    with pytest.raises(KvtoolError, match="this machine has") as caught:
        stated_memory(plan, work, 6, Machine(3 * each, 3 * each))
    assert (caught.value.code, caught.value.hint) == ("memory", "--workers 3 fits")
    assert stated_memory(plan, work, 99, Machine(10 * each, 10 * each)).startswith(f"{len(work)} workers")


def test_decomposing_and_double_precision_count() -> None:
    trace = open_trace(TINY)
    plain, double = make_plan(["knorm"], ratios=["0.5"]), make_plan(["knorm"], ratios=["0.5"], precision="float64")
    ((sequence, layer_id, step), *_) = work = work_of(trace, plain, None, None)
    assert unit_bytes(sequence, layer_id, double, step) > unit_bytes(sequence, layer_id, plain, step)
    assert gathered_bytes(plain, work) == gathered_bytes(double, work)
