"""`--decompose` from trace to tables: every number against loops over tokens, the softmax's Jacobian written out."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtool.decomposition.output_space import PAIRS, TERMS
from kvtool.replay import replay
from kvtool.result import Result
from kvtool.trace import open_trace

GROUP, PROMPT = 2, 34
SETTINGS = {"sinks": 1, "window": 2, "decompose": True, "samples": 0}
FAKE = """
from dataclasses import dataclass
import torch
from kvtool.policies import Policy
from kvtool.policies.objective import Objective
from kvtool.policies.query_statistics import QueryStatistics

@dataclass(frozen=True)
class Loud(Policy):
    '''Keeps the longest values, and says what it expects and what it means.'''

    def score(self, state, view):
        return view.values.norm(dim=-1)

    def query_statistics(self, view):
        heads, dim = view.geometry.query_heads, view.geometry.key_dim
        mean = torch.linspace(-1, 1, heads * dim, dtype=torch.float64).view(heads, dim)
        return QueryStatistics(mean, torch.eye(dim, dtype=torch.float64).expand(heads, -1, -1) * 0.5)

    def objective(self, view):
        values = view.values.to(torch.float64).repeat_interleave(view.geometry.group, dim=0)
        heads, tokens, _ = values.shape
        weights = torch.linspace(0, 1, heads * tokens, dtype=torch.float64).view(heads, tokens)
        return Objective(weights, values, torch.full((heads,), 0.5, dtype=torch.float64))
"""


@pytest.fixture(scope="module")
def loud(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("policy") / "loud.py"
    path.write_text(FAKE)
    return f"{path}:Loud"


@pytest.fixture(scope="module")
def result(traced: Any, loud: str) -> Result:
    return replay(traced(), ["knorm", loud], ratios=["0.6"], center="past", **SETTINGS)


pytestmark = pytest.mark.usefixtures("few_draws")


def attention(query: torch.Tensor, layer: Any, head: int, tokens: list[int]) -> tuple[list[float], list[float]]:
    """Weights and slopes of these tokens."""
    geometry = layer.geometry
    logits, slopes = [], []
    for token in tokens:
        z = geometry.scale * float(query @ layer.keys[head // GROUP, token])
        if geometry.softcap is not None:
            z = geometry.softcap * math.tanh(z / geometry.softcap)
        logits.append(z)
        slopes.append(1.0 if geometry.softcap is None else 1 - (z / geometry.softcap) ** 2)
    total = sum(math.exp(z) for z in logits)
    if geometry.sink_logits is not None:
        total += math.exp(float(geometry.sink_logits[head]))
    return [math.exp(z) / total for z in logits], slopes


def output(query: torch.Tensor, layer: Any, head: int, tokens: list[int]) -> torch.Tensor:
    weights, _ = attention(query, layer, head, tokens)
    return sum(w * layer.values[head // GROUP, t] for w, t in zip(weights, tokens, strict=True))  # type: ignore[return-value]


def slow_row(layer: Any, head: int, kept: list[int], mean: torch.Tensor, lam: torch.Tensor) -> dict[str, Any]:
    """The row of one query head at the event before row PROMPT, all queries evaluated."""
    geometry = layer.geometry
    first = 0 if geometry.window is None else PROMPT - geometry.window + 1
    pool = list(range(first, PROMPT))
    steps = [int(step) for step in layer.query_steps if step >= PROMPT]
    queries = [layer.queries[head, int((layer.query_steps == step).nonzero())] for step in steps]
    weights, slopes = attention(mean, layer, head, kept)
    a = torch.tensor(weights, dtype=torch.float64)
    s = torch.diag(a) - torch.outer(a, a)
    u = layer.values[head // GROUP, kept]
    k = torch.tensor(slopes, dtype=torch.float64)[:, None] * layer.keys[head // GROUP, kept]
    full, diagonal = (geometry.scale * u.T @ m @ k for m in (s, torch.diag(s.diagonal())))
    middle = output(mean, layer, head, kept)
    f_pool = torch.stack([output(q, layer, head, pool) for q in queries])
    f_kept = torch.stack([output(q, layer, head, kept) for q in queries])
    shift = torch.stack(queries) - mean
    vectors = {
        "selection": f_pool - f_kept,
        "taylor": f_kept - middle - shift @ full.T,
        "diagonal": shift @ (full - diagonal).T,
        "total": f_pool - middle - shift @ diagonal.T,
        "signal": f_kept - middle,
        "diagonal_unshared": geometry.scale * shift @ (u.T @ torch.diag(a**2) @ (k - a @ k)).T,
    }
    square = float(f_pool.square().sum())
    found: dict[str, Any] = {"sigma2_scaled": float(torch.cov(f_pool.T, correction=0).trace() / u.shape[1])}
    for name, vector in vectors.items():
        column = "tangent_signal" if name == "signal" else f"e_{name}"
        found[column] = math.sqrt(float(vector.square().sum()) / square)
    for one, other in PAIRS:
        found[f"cross_{one}_{other}"] = 2 * float((vectors[one] * vectors[other]).sum()) / square
    covariance = full @ lam @ full.T
    response = torch.diag((k @ lam @ k.T).diagonal())
    alone = torch.diag(s.diagonal())
    for kind, matrix in (
        ("competition", diagonal @ lam @ diagonal.T),
        ("response", geometry.scale**2 * u.T @ alone @ response @ alone @ u),
    ):
        found[f"diagonal_cov_error_{kind}"] = float((covariance - matrix).norm() / covariance.norm())
    gauss = torch.cov(f_kept.T, correction=0)
    for noise, sigma2 in (("unit", 1.0), ("scaled", found["sigma2_scaled"])):
        eye = torch.eye(u.shape[1], dtype=torch.float64)
        found[f"capacity_full_{noise}"] = 0.5 * float(torch.logdet(eye + covariance / sigma2))
        found[f"capacity_gauss_{noise}"] = 0.5 * float(torch.logdet(eye + gauss / sigma2))
        gap = found[f"capacity_gauss_{noise}"] - found[f"capacity_full_{noise}"]
        found[f"taylor_capacity_gap_{noise}"] = gap
    if layer.output_gradients is not None:
        dots = {
            name: torch.stack([(layer.output_gradients[:, head, i] * v[i]).sum(-1) for i in range(len(steps))])
            for name, v in vectors.items()
            if name != "diagonal_unshared"
        }
        drawn = len(steps) - 1  # nothing was drawn at the last step
        for name, dot in dots.items():
            found[f"nats_{name}"] = float(dot.square().sum() / (2 * drawn * dot.shape[1]))
        for one, other in PAIRS:
            found[f"nats_cross_{one}_{other}"] = float((dots[one] * dots[other]).sum() / (drawn * dots[one].shape[1]))
    return found


def kept_of(result: Result, row: dict[str, Any]) -> list[int]:
    (entry,) = (
        e
        for e in result.entries("evict_steps")
        if all(e[key] == row[key] for key in ("sequence", "policy", "ratio", "budget", "layer", "kv_head"))
    )
    return [p for p in range(PROMPT) if entry["evict_step"][p] > PROMPT]


def visible(layer: Any, rows: list[int]) -> list[int]:
    window = layer.geometry.window
    return [row for row in rows if window is None or PROMPT - row < window]


def check_row(result: Result, trace: Path, row: dict[str, Any], mean: torch.Tensor, lam: torch.Tensor) -> None:
    layer = open_trace(trace).sequences[row["sequence"]].layer(row["layer"], dtype=torch.float64)
    kept = visible(layer, kept_of(result, row))
    expected = slow_row(layer, row["q_head"], kept, mean, lam)
    assert row["kept"] == len(kept)
    assert row["queries"] == 53 - PROMPT
    for name, value in expected.items():
        assert row[name] == pytest.approx(value, rel=1e-9, abs=1e-11), name


@pytest.mark.parametrize("layer_id", [0, 1, 2])
@pytest.mark.parametrize("q_head", [0, 1, 3])
def test_rows_equal_loops_over_tokens(result: Result, traced: Any, layer_id: int, q_head: int) -> None:
    rows = [
        r for r in result.entries("decomposition") if (r["sequence"], r["layer"], r["q_head"]) == (1, layer_id, q_head)
    ]
    assert len(rows) == 4
    for row in rows:
        layer = open_trace(traced()).sequences[1].layer(layer_id, dtype=torch.float64)
        if row["policy"].endswith("Loud"):
            mean = torch.linspace(-1, 1, 32, dtype=torch.float64).view(4, 8)[q_head]
            lam = torch.eye(8, dtype=torch.float64) * 0.5
            assert (row["center"], row["covariance"]) == ("policy", "diagonal")
        else:
            past = layer.queries[q_head, 4:PROMPT]
            mean, lam = past.mean(0), torch.cov(past.T, correction=0)
            assert (row["center"], row["covariance"]) == ("past", "full")
        check_row(result, traced(), row, mean, lam)


@pytest.mark.parametrize("center", ["prompt", "future", "rope_mean"])
def test_every_centre_is_what_it_says(traced: Any, center: str) -> None:
    found = replay(traced(), ["knorm"], ratios=["0.6"], center=center, sequences=[0], **SETTINGS)
    for layer_id in (0, 1):
        layer = open_trace(traced()).sequences[0].layer(layer_id, dtype=torch.float64)
        row = next(r for r in found.entries("decomposition") if (r["layer"], r["q_head"]) == (layer_id, 2))
        queries = layer.queries[2, PROMPT:] if center == "future" else layer.queries[2, 4:PROMPT]
        expected = center
        if center == "rope_mean" and layer_id == 1:
            expected = "prompt"  # nothing to turn
        elif center == "rope_mean":
            rotation = layer.geometry.rotation
            rows = torch.arange(4, PROMPT)
            queries = rotation.unrotate(queries, rows, rows)
        mean, lam = queries.mean(0), torch.cov(queries.T, correction=0)
        if center == "rope_mean" and layer_id == 0:
            turn = rotation.mean_matrix(torch.arange(PROMPT, PROMPT + 512), 8)
            mean, lam = turn @ mean, turn @ lam @ turn.T
        assert row["center"] == expected
        check_row(found, traced(), row, mean, lam)


def test_prompt_and_past_part_where_the_event_comes_later(traced: Any) -> None:
    at = {"evict_at": 44, "ratios": ["0.5"], "layers": [0], "sequences": [0], **SETTINGS}
    rows = [replay(traced(), ["knorm"], center=c, **at).entries("decomposition")[0] for c in ("prompt", "past")]
    assert rows[0]["e_selection"] == rows[1]["e_selection"]
    assert rows[0]["e_taylor"] != rows[1]["e_taylor"]
    assert rows[0]["event"] == rows[1]["event"] == 44


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_identities_hold_whatever_the_trace_stores(traced: Any, loud: str, dtype: torch.dtype, precision: str) -> None:
    found = replay(
        traced(dtype),
        ["snapkv:window=4", "capkv", "jacap", loud],
        ratios=["0.5", "0.9"],
        precision=precision,
        **SETTINGS,
    )
    rows = found.entries("decomposition")
    assert len(rows) == 6 * 2 * 2 * 3 * 4
    for row in rows:
        assert row["identity_residual"] < 1e-10
        assert 0 < row["tangent_residual"] < 1e-5  # 0 would mean that nothing was differenced
        square = sum(row[f"e_{term}"] ** 2 for term in TERMS) + sum(row[f"cross_{a}_{b}"] for a, b in PAIRS)
        assert row["e_total"] ** 2 == pytest.approx(square, rel=1e-9)
        nats = sum(row[f"nats_{term}"] for term in TERMS) + sum(row[f"nats_cross_{a}_{b}"] for a, b in PAIRS)
        assert row["nats_total"] == pytest.approx(nats, rel=1e-9, abs=1e-15)
        for noise in ("unit", "scaled"):
            mc, gauss = row[f"capacity_mc_{noise}"], row[f"capacity_gauss_{noise}"]
            assert 0 <= mc <= min(math.log(row["queries"]), gauss)
            saturated = mc > 0.9 * math.log(row["queries"])
            assert row[f"capacity_mc_saturated_{noise}"] is saturated
            expected = None if saturated else pytest.approx(gauss - mc, abs=1e-12)
            assert row[f"shape_gap_{noise}"] == expected


def test_numbers_do_not_depend_on_the_replays_precision_where_decisions_do_not(traced: Any) -> None:
    found = [replay(traced(), ["knorm"], ratios=["0.5"], precision=p, **SETTINGS) for p in ("float32", "float64")]
    assert found[0].entries("decomposition") == found[1].entries("decomposition")


def test_nothing_evicted_is_exactly_no_selection(traced: Any) -> None:
    rows = replay(traced(), ["knorm"], ratios=["0"], **SETTINGS).entries("decomposition")
    assert rows
    for row in rows:
        assert row["e_selection"] == row["nats_selection"] == 0
        assert row["cross_selection_taylor"] == row["cross_selection_diagonal"] == 0
        assert row["kept"] == row["pool"]
        assert row["e_taylor"] > 0


def test_one_kept_token_has_no_tangent_and_its_nulls(traced: Any) -> None:
    rows = replay(traced(), ["knorm"], budgets=[1], layers=[0], sinks=0, window=0, decompose=True, samples=0).entries(
        "decomposition"
    )
    mine = [row for row in rows if row["policy"] == "knorm"]
    assert mine
    for row in mine:
        assert row["kept"] == 1
        assert row["tangent_signal"] == row["e_taylor"] == row["e_diagonal"] == row["tangent_residual"] == 0
        assert row["diagonal_cov_error_centred"] is None
        assert row["capacity_full_unit"] == row["capacity_gauss_unit"] == row["capacity_mc_unit"] == 0


def test_no_gradients_no_nats_and_no_objective_no_capacity_of_its_own(traced: Any, loud: str) -> None:
    rows = replay(traced(gradients=False), ["knorm", loud], ratios=["0.6"], **SETTINGS).entries("decomposition")
    assert all(row[name] is None for row in rows for name in row if name.startswith("nats_"))
    for row in rows:
        mine = row["policy"].endswith("Loud") and row["layer"] != 2  # a borrowed cache was chosen by another layer
        assert (row["capacity_objective"] is not None) == mine


def test_the_objectives_capacity_is_that_of_the_kept_set(result: Result, traced: Any) -> None:
    row = next(r for r in result.entries("decomposition") if r["policy"].endswith("Loud") and r["q_head"] == 3)
    layer = open_trace(traced()).sequences[row["sequence"]].layer(row["layer"], dtype=torch.float64)
    kept = kept_of(result, row)
    weights = torch.linspace(0, 1, 4 * PROMPT, dtype=torch.float64).view(4, PROMPT)[3]
    gram = sum(float(weights[t]) * torch.outer(layer.values[1, t], layer.values[1, t]) for t in kept) / 0.5
    expected = 0.5 * float(torch.logdet(torch.eye(6, dtype=torch.float64) + gram))
    assert row["layer"] == 0
    assert row["capacity_objective"] == pytest.approx(expected, rel=1e-10)


def test_the_horizon_cuts_queries_and_the_divisor_of_nats(traced: Any) -> None:
    row = replay(traced(), ["knorm"], ratios=["0.6"], horizon=5, layers=[0], **SETTINGS).entries("decomposition")[0]
    assert row["queries"] == 5
    one = replay(traced(), ["knorm"], ratios=["0.6"], horizon=1, layers=[0], **SETTINGS).entries("decomposition")[0]
    assert one["queries"] == 1
    assert one["sigma2_scaled"] == 0
    assert one["capacity_full_scaled"] is one["capacity_mc_scaled"] is one["shape_gap_scaled"] is None
    assert one["capacity_full_unit"] > 0
    assert one["capacity_mc_unit"] == 0
