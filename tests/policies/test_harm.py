"""What a policy of others writes, and what it hands out twice, reaches no other policy, budget or event."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from kvtool.errors import KvtoolError
from kvtool.replay import replay

TINY = Path(__file__).resolve().parents[2] / "sample_traces" / "tiny-gqa.zarr"
CUT: dict[str, Any] = {"layers": [0], "sequences": [0], "sinks": 1, "window": 8}
EVENTS: dict[str, Any] = {"budgets": [30, 40], "schedules": ["every:8"]}
POLICY = '''
from dataclasses import dataclass
import torch
from kvtool.policies import Policy

@dataclass(frozen=True)
class Own(Policy):
    """Keep long keys."""

    def score(self, state, view):
        HERE
        return view.keys.norm(dim=-1)
'''


@pytest.fixture
def own(tmp_path: Path) -> Callable[[str], str]:
    """A policy in a file of its own: source -> its word."""

    def one(source: str, name: str = "own") -> str:
        (tmp_path / f"{name}.py").write_text(source)
        return f"{tmp_path}/{name}.py:Own"

    return one


@pytest.mark.parametrize(
    "change",
    [
        "view.keys.numpy()[:] = 0",
        "view.values.numpy().sort(axis=1)",
        "view.queries(view.step - 1, view.step).numpy()[:] = 0",
        "view.tokens.numpy()[:] = 0",
        "view.positions(view.tokens).numpy(); view._layer.positions.numpy()[0] = 7",
        "view.rotation.inv_freq.numpy()[:] = 0",
        "view.output_projection.numpy()[:] = 0",
    ],
)
@pytest.mark.parametrize("how", [{"ratios": ["0.5"]}, EVENTS], ids=["once", "events"])
def test_writing_through_numpy_is_refused(own: Callable[[str], str], change: str, how: dict[str, Any]) -> None:
    with pytest.raises(KvtoolError, match="changed what it was shown at layer 0") as caught:
        replay(TINY, [own(POLICY.replace("HERE", change))], **how, **CUT)
    assert caught.value.code == "policy-broken"


def test_writing_where_only_a_decomposition_asks_is_refused(own: Callable[[str], str]) -> None:
    late = POLICY.replace("HERE", "pass") + (
        "\n    def objective(self, view):\n        view.keys.numpy()[:] = 0\n        return None\n"
    )
    with pytest.raises(KvtoolError, match="changed what it was shown at layer 0"):
        replay(TINY, [own(late)], ratios=["0.5"], decompose=True, samples=0, horizon=4, **CUT)
    assert replay(TINY, [own(late)], ratios=["0.5"], **CUT).tables["cells"]


@pytest.mark.parametrize("write", ["scores.numpy().sort()", "scores.zero_()"])
def test_writing_into_the_scores_to_refine_is_refused(own: Callable[[str], str], write: str) -> None:
    source = POLICY.replace("HERE", "pass").replace('"""\n', '"""\n\n    nested = False\n')
    source += f"\n    def refine(self, scores, view, allowed, shield):\n        {write}\n        return scores\n"
    with pytest.raises(KvtoolError, match="changed the scores it was to refine at layer 0"):
        replay(TINY, [own(source)], ratios=["0.5", "0.75"], **CUT)


def test_a_buffer_of_scores_that_is_used_again_decides_nothing_else(own: Callable[[str, str], str]) -> None:
    plain = POLICY.replace("HERE", "pass")
    reused = plain.replace("@dataclass", "BUFFER = torch.zeros(9999)\n\n@dataclass").replace(
        "return view.keys.norm(dim=-1)",
        "found = view.keys.norm(dim=-1)\n        return BUFFER[: found.numel()].view(found.shape).copy_(found)",
    )
    sets = [
        replay(TINY, [own(text, name)], **EVENTS, **CUT).tables["evict_steps"]["digest"].to_pylist()
        for name, text in (("plain", plain), ("reused", reused))
    ]
    assert sets[0] == sets[1]


def test_a_state_that_is_written_into_stays_with_its_budget(own: Callable[[str], str]) -> None:
    source = POLICY.replace("        HERE\n", "").replace(
        "return view.keys.norm(dim=-1)", "return view.keys.norm(dim=-1) * (1 if state[0] % 2 else -1)"
    )
    source += "\n    def start(self, geometry):\n        return [0]\n"
    source += "\n    def observe(self, state, view):\n        state[0] += 1\n        return state\n"
    word = own(source)
    both = replay(TINY, [word], **EVENTS, **CUT).entries("evict_steps")
    for budget in EVENTS["budgets"]:
        alone = replay(TINY, [word], budgets=[budget], schedules=["every:8"], **CUT).entries("evict_steps")
        assert alone == [entry for entry in both if entry["budget"] == budget]


@pytest.mark.parametrize(
    ("said", "wrong"),
    [
        ("{'oracle': view.values.new_zeros(8)}", "oracle, which is a column already"),
        ("{'capacity_best': view.values.new_zeros(8)}", "capacity_best, which is a column already"),
        ("{'mine': torch.zeros(8, device='meta')}", "something other than named numbers"),
        ("{'mine': torch.zeros(8) + 1j}", "something other than named numbers"),
        ("{'\\ud800': torch.zeros(8)}", "something other than named numbers"),
    ],
)
def test_diagnostics_that_no_table_can_hold(own: Callable[[str], str], said: str, wrong: str) -> None:
    source = POLICY.replace("HERE", "pass") + f"\n    def diagnose(self, state, view):\n        return {said}\n"
    with pytest.raises(KvtoolError) as caught:
        replay(TINY, [own(source)], ratios=["0.5"], **CUT)
    assert caught.value.code == "policy-broken"
    assert wrong in caught.value.message


def test_diagnostics_are_float64_whatever_they_are_called(own: Callable[[str], str], tmp_path: Path) -> None:
    source = POLICY.replace("HERE", "pass")
    source += "\n    def diagnose(self, state, view):\n        return {'odd_tokens': torch.full((8,), 0.5)}\n"
    rows = replay(TINY, [own(source)], ratios=["0.5"], output=tmp_path / "out", **CUT).tables["rows"]
    assert rows.schema.field("odd_tokens").type == pa.float64()
    assert set(rows["odd_tokens"].to_pylist()) == {0.5, None}  # the controls say nothing


def test_scores_that_hold_no_numbers_are_the_policys_fault(own: Callable[[str], str]) -> None:
    source = POLICY.replace("HERE", "return view.keys.norm(dim=-1).to('meta')")
    with pytest.raises(KvtoolError, match="scores that cannot be read") as caught:
        replay(TINY, [own(source)], ratios=["0.5"], **CUT)
    assert caught.value.code == "policy-broken"
