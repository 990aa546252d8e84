"""`--device cuda` without a card: what does not need one. Kernels are checked in Triton's interpreter, in a process
of its own, since that mode is chosen when Triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from kvtool.bench import card_operations, device
from kvtool.bench.card_operations import Check, Work, batched_leverage, plain_mass
from kvtool.bench.device import GOALS, GROUPS, Rates, refused
from kvtool.bench.scoring import solved_leverage
from kvtool.bench.synthetic import Heads, case
from kvtool.cli.main import run
from kvtool.kernels.attention_mass import attention_mass

CHECK = """
import sys
from kvtool.bench import card_operations, device
name = sys.argv[1]
sizes = {"tokens": 63, "queries": 5} if name in ("cell_errors", "attention_mass") else {"tokens": 63}
found = card_operations.CHECKS[name]("cpu", **sizes)
print(found.worst, device.refused(found) is None)
"""


@pytest.mark.parametrize("name", ["cell_errors", "attention_mass", "leverage", "tangent"])
def test_kernels_pass_their_check_in_the_interpreter(name: str) -> None:
    pytest.importorskip("triton")
    pytest.importorskip(f"kvtool.kernels.{'retained_attention' if name == 'cell_errors' else name}.triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", CHECK, name], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    worst, right = done.stdout.split()
    assert right == "True", worst


def test_a_wrong_kernel_is_not_timed() -> None:
    reason = refused(Check(0.5, 1e-3))
    assert reason is not None
    assert reason.ratio is None
    assert "wrong" in str(reason.reason)
    assert refused(Check(1e-4, 1e-3)) is None
    assert refused(card_operations._check(torch.tensor([0.0, float("nan")]), torch.float32)) is not None


def test_the_floor_is_the_larger_of_bytes_and_flops() -> None:
    rates = Rates(100.0, {torch.float32: 10.0})
    work = Work(lambda: None, {}, 1000, 50, torch.float32)
    assert rates.floor(work) == 10.0
    assert rates.floor(Work(lambda: None, {}, 100, 50, torch.float32)) == 5.0


def test_every_device_goal_is_measured_by_one_group() -> None:
    names = [name for group, _ in GROUPS for name in group]
    assert sorted(names) == sorted(goal.name for goal in GOALS)


def test_plain_torch_on_the_card_gives_the_same_answers() -> None:
    made = case(Heads("small", 4, 2, 16), 90, 70)
    how = {"steps": made.steps, "rows": torch.arange(90), "first_visible": torch.zeros(70, dtype=torch.int64)}
    mass = attention_mass(made.queries, made.keys, scale=made.scale, **how)
    assert torch.allclose(plain_mass(made), mass, rtol=1e-4, atol=1e-6)
    u, w, ridge = card_operations._directions(4, 2, 60, 8)
    plain = solved_leverage(u.double(), w, ridge)
    assert torch.allclose(batched_leverage(u, w, ridge).double(), plain, rtol=1e-4, atol=1e-6)


def test_without_a_card_there_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a card")
    assert run(["bench", "--device", "cuda"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert said.err.count("error: ") == 1
    assert device.refuse_without_card.__doc__
