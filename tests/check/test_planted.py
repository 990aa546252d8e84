"""Regressions planted on purpose are found and named; a change of numbers alone is called one, and passes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvtool.check import Check, check
from kvtool.cli.main import run
from kvtool.metrics.output_error import LayerError, OutputError
from kvtool.policies.knorm import KNorm
from kvtool.view import View

from .conftest import Suite

KNORM = "knorm @0.5 prompt-end sequence 0"
POLICY = """
from dataclasses import dataclass
from kvtool.policies import Policy
from kvtool.policies.recent_attention import recent_attention
from kvtool.policies.group import reduce_group

@dataclass(frozen=True)
class Mine(Policy):
    def score(self, state, view):
        votes, voters = recent_attention(view, {window})
        return {sign}reduce_group(votes / voters, view.geometry.kv_heads, "mean"){cast}
"""


def row(found: Check, name: str) -> Any:
    return next(row for job in found.jobs for row in job.rows if row.name == name)


def moved(found: Check, name: str) -> dict[int, tuple[str, tuple[int, ...]]]:
    """Layer -> (kind, KV heads), of those that moved."""
    return {one.layer: (one.kind, one.kv_heads) for one in row(found, name).layers if one.kind != "identical"}


def scored(change: Callable[[Tensor, View], Tensor]) -> Callable[[KNorm, Any, View], Tensor]:
    score = KNorm.score
    return lambda self, state, view: change(score(self, state, view), view)


@pytest.mark.parametrize("only_layer", [None, 3])
def test_a_flipped_sign(
    suite: Suite, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], only_layer: int | None
) -> None:
    path = suite()
    check(path, update=True)
    monkeypatch.setattr(KNorm, "score", scored(lambda s, view: -s if only_layer in (None, view.geometry.layer) else s))
    assert run(["check", str(path)]) == 1
    out = " ".join(capfd.readouterr().out.split())
    assert "behaviour" in out
    found = check(path)
    assert found.kind == "behaviour"
    layers = [0, 3] if only_layer is None else [3]
    assert moved(found, KNORM) == dict.fromkeys(layers, ("behaviour", (0, 1)))
    assert f"layer {layers[-1]} (KV heads 0-1)" in found.document()["jobs"][0]["cells"][1]["message"]
    others = [r for job in found.jobs for r in job.rows if r.name != KNORM]
    assert {r.outcome for r in others} == {"same"}


def test_one_head_alone(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    path = suite()
    check(path, update=True)
    side = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    monkeypatch.setattr(KNorm, "score", scored(lambda s, view: s * side if view.geometry.layer == 0 else s))
    assert moved(check(path), KNORM) == {0: ("behaviour", (1,))}


@pytest.mark.parametrize(
    "change",
    [{"window": 7}, {"window": 9}, {"sign": "-"}, {"cast": ".bfloat16().double()"}],
    ids=["window one less", "window one more", "sign", "bf16"],
)
def test_an_edited_policy(suite: Suite, tmp_path: Path, change: dict[str, Any]) -> None:
    path = suite(jobs='[[jobs]]\nname = "mine"\npolicies = ["mine.py:Mine"]')
    code = {"window": 8, "sign": "", "cast": ""}
    (tmp_path / "mine.py").write_text(POLICY.format(**code))
    check(path, update=True)
    assert check(path).kind == "identical"
    (tmp_path / "mine.py").write_text(POLICY.format(**{**code, **change}))
    found = check(path)
    assert not found.ok
    assert found.kind == "behaviour"
    kinds = moved(found, "mine.py:Mine @0.5 prompt-end sequence 0")
    assert set(kinds) == {0, 3}
    assert {kind for kind, _ in kinds.values()} == {"behaviour"}
    assert run(["check", str(path)]) == 1


def noisy(metric: type, layers: tuple[int, ...], size: float) -> Callable[..., list[dict[str, Tensor]]]:
    partials = metric.partials

    def measure(self: Any, errors: Any, geometry: Any, retained: Any) -> list[dict[str, Tensor]]:
        cells = partials(self, errors, geometry, retained)
        name = metric.name
        return [{**cell, name: cell[name] * (1 + size)} for cell in cells] if geometry.layer in layers else cells

    return measure


@pytest.mark.parametrize("layers", [(3,), (0, 3)])
def test_noise_within_tolerance_passes_and_is_called_numerics(
    suite: Suite, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], layers: tuple[int, ...]
) -> None:
    path = suite()
    check(path, update=True)
    for metric in (OutputError, LayerError):
        monkeypatch.setattr(metric, "partials", noisy(metric, layers, 1e-9))
    assert run(["check", str(path)]) == 0
    assert "kind of the change: numerics" in capfd.readouterr().out
    found = check(path, strict=True)
    assert (found.ok, found.kind, row(found, KNORM).outcome) == (True, "numerics", "within")
    assert moved(found, KNORM) == dict.fromkeys(layers, ("numerics", ()))


def test_noise_beyond_tolerance_fails_and_is_still_called_numerics(
    suite: Suite, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = suite()
    check(path, update=True)
    monkeypatch.setattr(OutputError, "partials", noisy(OutputError, (3,), 1e-3))
    found = check(path)
    assert (found.ok, found.kind, row(found, KNORM).outcome) == (False, "numerics", "worse")


def test_scores_summed_in_another_order_are_no_change_of_behaviour(
    suite: Suite, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = suite()
    check(path, update=True)
    seen = []

    def backwards(scores: Tensor, view: View) -> Tensor:
        again = -(view.keys.double().flip(-1) ** 2).cumsum(-1)[..., -1].sqrt()  # one by one, from the last channel
        seen.append(bool((again != scores).any()) and torch.allclose(again, scores.double(), rtol=1e-12))
        return again

    monkeypatch.setattr(KNorm, "score", scored(backwards))
    found = check(path, strict=True)
    assert any(seen)  # other bits, the same numbers
    assert found.ok
    assert found.kind in ("identical", "numerics")


def test_a_tie_that_falls_otherwise_passes_and_is_said(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores that differ by less than rounding, in one order and then in the other."""
    slope = {"way": 1.0}

    def flat(self: KNorm, state: Any, view: View) -> Tensor:
        return 1.0 + slope["way"] * 1e-14 * view.tokens.double()

    monkeypatch.setattr(KNorm, "score", flat)
    path = suite(jobs='[[jobs]]\nname = "flat"\npolicies = ["knorm"]\nmetrics = ["evicted"]')
    check(path, update=True)
    slope["way"] = -1.0
    found = check(path, strict=True)
    assert (found.ok, found.kind, row(found, KNORM).outcome) == (True, "numerics", "tie")
    assert moved(found, KNORM) == dict.fromkeys((0, 3), ("numerics", (0, 1)))
    assert "ties fell otherwise in layer 0 (KV heads 0-1)" in found.document()["jobs"][0]["cells"][1]["message"]


def test_scores_a_little_further_apart_are_no_tie(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    slope = {"way": 1.0}
    monkeypatch.setattr(KNorm, "score", lambda self, state, view: 1.0 + slope["way"] * 1e-8 * view.tokens.double())
    path = suite(jobs='[[jobs]]\nname = "flat"\npolicies = ["knorm"]\nmetrics = ["evicted"]')
    check(path, update=True)
    slope["way"] = -1.0
    found = check(path)
    assert (found.ok, found.kind, row(found, KNORM).outcome) == (False, "behaviour", "moved")
