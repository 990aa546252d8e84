"""Cases with a known answer: a sink that must stay, a needle that past queries cannot see, sink logits, windows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvtool.kernels.attention_mass.reference import attention_mass
from kvtool.layer import Layer
from kvtool.replay import replay
from kvtool.result import Result
from kvtool.trace import open_trace

TINY = Path(__file__).resolve().parents[2] / "sample_traces" / "tiny-gqa.zarr"


def error_of(result: Result, policy: str) -> float:
    (cell,) = (c for c in result.entries("cells") if c["policy"] == policy and c["sequence"] is None)
    return float(cell["mean_layer_error"])


def future_share(layer: Layer, token: int) -> float:
    steps = torch.arange(128, 160)
    mass = attention_mass(
        layer.queries[:, 128:],
        layer.keys,
        steps=steps,
        rows=torch.arange(160),
        first_visible=layer.geometry.first_visible(steps),
        scale=layer.geometry.scale,
        sink_logits=layer.geometry.sink_logits,
    )
    return float(mass[:, token].mean()) / len(steps)


def test_the_trace_has_the_structure_it_claims() -> None:
    sequence = open_trace(TINY).sequences[0]
    assert 0.5 < future_share(sequence.layer(0), 0) < 0.7
    assert future_share(sequence.layer(3), 40) > 0.7
    assert sequence.text(40) == "needle "
    layer = sequence.layer(3)
    prompt = torch.arange(128)
    seen = attention_mass(
        layer.queries[:, :128],
        layer.keys,
        steps=prompt,
        rows=torch.arange(160),
        first_visible=torch.zeros_like(prompt),
        scale=layer.geometry.scale,
    )
    assert float(seen[:, 40].max()) / 128 < 1e-3


def test_losing_the_sink_is_a_large_error_and_one_protected_token_removes_it() -> None:
    bare, kept = (
        replay(TINY, ["streaming-llm:sinks=0"], ratios=["0.5"], sinks=sinks, window=32, layers=[0]) for sinks in (0, 1)
    )
    lost, saved = error_of(bare, "streaming-llm:sinks=0"), error_of(kept, "streaming-llm:sinks=0")
    assert lost > 2.0
    assert saved < 0.8
    masses = [
        [r["evicted_mass"] for r in result.entries("rows") if r["policy"] == "streaming-llm:sinks=0"]
        for result in (bare, kept)
    ]
    share = future_share(open_trace(TINY).sequences[0].layer(0), 0)
    dropped = sum(masses[0]) / len(masses[0]) - sum(masses[1]) / len(masses[1])
    assert dropped == pytest.approx(share, abs=0.05)  # the lost mass is token 0's


def test_only_the_future_knows_the_needle() -> None:
    result = replay(
        TINY, ["snapkv:window=8", "h2o", "oracle-mass", "oracle-caote"], ratios=["0.5"], window=8, layers=[3]
    )
    for causal in ("snapkv:window=8", "h2o"):
        assert error_of(result, causal) > 0.9
        for oracle in ("oracle-mass", "oracle-caote"):
            assert error_of(result, oracle) < 0.2
    kept = {
        (e["policy"], e["sequence"], e["kv_head"]): e["evict_step"][40] == 160
        for e in result.entries("evict_steps")
        if e["policy"] in ("h2o", "oracle-mass")
    }
    assert all(stays == (policy == "oracle-mass") for (policy, _, _), stays in kept.items())


def test_a_sink_logit_keeps_its_share_when_one_token_is_left() -> None:
    make = torch.Generator().manual_seed(0)
    layer = Layer.from_arrays(
        torch.randn(1, 9, 4, generator=make),
        torch.randn(1, 9, 4, generator=make),
        torch.randn(1, 9, 4, generator=make),
        prompt_length=8,
        scale=0.5,
        sink_logits=torch.tensor([1.5]),
        dtype=torch.float64,
    )
    from kvtool.metrics import evaluate_layer
    from kvtool.retained import RetainedSet

    evict = torch.full((1, 9), 8, dtype=torch.int32)
    evict[0, 8] = 9
    (errors,) = evaluate_layer(layer, [RetainedSet(evict)], torch.tensor([8]))
    z = 0.5 * layer.queries[0, 8] @ layer.keys[0].T
    left = z[8].exp() / (z[8].exp() + torch.tensor(1.5, dtype=torch.float64).exp()) * layer.values[0, 8]
    full = (z.exp() @ layer.values[0]) / (z.exp().sum() + torch.tensor(1.5, dtype=torch.float64).exp())
    assert float(errors.squared_error[0, 0]) == pytest.approx(float((full - left).square().sum()), rel=1e-12)
    assert not torch.allclose(left, layer.values[0, 8])


def test_every_cell_of_every_sequence_is_compressed() -> None:
    result = replay(TINY, ["snapkv:window=4"], budgets=[40], layers=[0, 3], window=4)
    kept = {
        (e["sequence"], e["layer"], e["kv_head"]): e["achieved"]
        for e in result.entries("evict_steps")
        if "snap" in e["policy"]
    }
    assert len(kept) == 8
    assert set(kept.values()) == {40}
    assert not any("no effect" in warning for warning in result.warnings)


def test_ratio_and_count_give_the_same_sets() -> None:
    by_ratio = replay(TINY, ["knorm"], ratios=["0.75"], layers=[0])
    by_count = replay(TINY, ["knorm"], budgets=[32], layers=[0])
    assert [e["evict_step"] for e in by_ratio.entries("evict_steps")] == [
        e["evict_step"] for e in by_count.entries("evict_steps")
    ]
    assert {e["budget"] for e in by_count.entries("rows")} == {32}
    assert {e["ratio"] for e in by_count.entries("rows")} == {None}


def test_capacity_policies_log_rho_and_others_do_not() -> None:
    result = replay(TINY, ["jacap", "capkv"], ratios=["0.5"], layers=[0])
    rho = {(r["policy"], r["q_head"]): r["rho"] for r in result.entries("rows")}
    assert all(0 <= rho[policy, head] < 1 for policy in ("jacap", "capkv") for head in range(8))
    assert rho["random", 0] is None


def test_skipped_layers_keep_everything() -> None:
    result = replay(TINY, ["knorm:skip_layers=1"], ratios=["0.75"], layers=[0, 3])
    errors = {
        e["layer"]: e["layer_error"]
        for e in result.entries("layers")
        if e["policy"].startswith("knorm") and e["sequence"] == 0
    }
    assert errors[0] == 0.0
    assert errors[3] > 0.1
