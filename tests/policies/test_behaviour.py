"""What policies are known for, and what goes wrong in the field."""

import math

import pytest
import torch

from kvtool.errors import KvtoolError
from kvtool.kernels.attention_mass import attention_blocks
from kvtool.kernels.attention_mass.reference import TILE_BYTES
from kvtool.layer import Layer
from kvtool.policies import BUILT_IN, Protection, policy_from_text
from kvtool.rotation import Rotation
from kvtool.selection import NaNScore, select
from kvtool.testing import example_layer, scores_at
from kvtool.view import View


def kept(text, layer, step, budget):
    """Rows kept by every KV head under the policy's own protection."""
    _, policy = policy_from_text(text)
    tokens = View.at(layer, step).tokens
    shield = policy.protection(budget)
    scores = scores_at(policy, layer, step)
    allowed = [budget] * tokens.shape[0]
    chosen = select(scores, tokens, allowed, sinks=shield.sinks, window=shield.window, step=step)
    return [tokens[h][chosen.keep[h]].tolist() for h in range(tokens.shape[0])]


def test_streaming_llm_keeps_sinks_and_the_newest():
    layer = example_layer(40)
    assert kept("streaming-llm", layer, 32, 10) == [[0, 1, 2, 3, 26, 27, 28, 29, 30, 31]] * 2
    assert kept("streaming-llm", layer, 32, 3) == [[0, 1, 2]] * 2
    assert kept("streaming-llm:sinks=0", layer, 32, 3) == [[29, 30, 31]] * 2
    sliding = example_layer(40, kind="sliding", window=8)  # its sinks are long out of sight: nothing replaces them
    assert kept("streaming-llm", sliding, 32, 3) == [[29, 30, 31]] * 2


def test_h2o_credits_every_query_not_only_the_last_window():
    """Query 0 sees only token 0; all later ones look at token 5."""
    keys = torch.zeros(1, 30, 4)
    keys[0, :, 0] = -5.0
    keys[0, 5, 0] = 30.0
    queries = torch.zeros(1, 30, 4)
    queries[..., 0] = 1.0
    layer = Layer.from_arrays(queries, keys, torch.ones(1, 30, 4), prompt_length=28, scale=1.0, rotation="none")
    mass = scores_at(policy_from_text("h2o:recent=0")[1], layer, 28)[0]
    assert float(mass[5]) == pytest.approx(23.0, abs=1e-6)
    assert float(mass[0]) == pytest.approx(1 + 1 / 2 + 1 / 3 + 1 / 4 + 1 / 5, abs=1e-6)
    recent = scores_at(policy_from_text("snapkv:window=8,kernel=1")[1], layer, 28)[0]
    assert float(recent[0]) < 1e-12


def test_h2o_sets_half_of_the_budget_aside():
    _, policy = policy_from_text("h2o")
    assert [policy.protection(b).window for b in (1, 2, 7, 128)] == [0, 1, 3, 64]
    assert policy_from_text("h2o:recent=0.1")[1].protection(30) == Protection(window=3)  # 0.1 * 30 is 3 exactly
    assert [r[-5:] for r in kept("h2o", example_layer(40), 32, 10)] == [[27, 28, 29, 30, 31]] * 2


def test_h2o_over_5000_steps_of_16_bit_data_equals_float64():
    generator = torch.Generator().manual_seed(0)
    arrays = [torch.randn(1, 5001, 8, generator=generator).to(torch.bfloat16) for _ in range(3)]
    layer = Layer.from_arrays(*arrays, prompt_length=5000, scale=0.5, rotation="none")
    q, k = (x[0].double() for x in arrays[:2])
    reference = torch.zeros(5000, dtype=torch.float64)
    for start in range(0, 5000, 500):
        z = 0.5 * q[start : start + 500] @ k[: start + 500].T
        hidden = torch.arange(start + 500) > torch.arange(start, start + 500)[:, None]
        reference[: start + 500] += z.masked_fill(hidden, -torch.inf).softmax(1).sum(0)
    expected = sorted(reference.sort(descending=True).indices[:1000].tolist())
    assert kept("h2o:recent=0", layer, 5000, 1000) == [expected]


def test_no_block_of_attention_outgrows_its_tile():
    steps = torch.full((4096,), 16383)
    blocks = attention_blocks(
        torch.zeros(8, 4096, 2),
        torch.zeros(2, 16384, 2),
        steps=steps,
        rows=torch.arange(16384),
        first_visible=steps * 0,
        scale=1.0,
    )
    first = next(iter(blocks))
    assert first.weights.shape == (8, 32, 16384)
    assert first.weights.numel() * 4 <= TILE_BYTES


def test_snapkv_with_one_query_and_no_pooling_is_tova():
    layer = example_layer(40, kv_heads=1, dtype=torch.float64)
    snapkv = scores_at(policy_from_text("snapkv:window=1,kernel=1")[1], layer, 32)
    tova = scores_at(policy_from_text("tova")[1], layer, 32)
    assert torch.equal(snapkv[:, :31], tova[:, :31])
    for budget in (1, 5, 17):
        assert kept("snapkv:window=1,kernel=1", layer, 32, budget) == kept("tova", layer, 32, budget)


def test_tova_keeps_the_same_tokens_in_every_head_unless_asked_otherwise():
    layer = example_layer(40, seed=5)
    same = kept("tova", layer, 32, 8)
    assert same[0] == same[1]
    assert 31 in same[0]
    apart = kept("tova:heads=kv-head", layer, 32, 8)
    assert apart[0] != apart[1]


@pytest.mark.parametrize("name", sorted(set(BUILT_IN) - {"oracle-mass", "oracle-caote", "random"}))
@pytest.mark.parametrize("group", ["mean", "max"])
def test_identical_query_heads_in_a_group_score_like_no_groups(name, group):
    grouped = example_layer(40, seed=3, query_heads=2, kv_heads=2, dtype=torch.float64)
    queries = grouped.queries.repeat_interleave(3, 0)
    geometry = grouped.geometry
    repeated = Layer.from_arrays(
        queries,
        grouped.keys,
        grouped.values,
        prompt_length=32,
        scale=geometry.scale,
        positions=grouped.positions,
        rotation=geometry.rotation,
        dtype=torch.float64,
    )
    _, policy = policy_from_text(name)
    if hasattr(policy, "group"):
        policy = type(policy)(group=group)
    assert torch.allclose(scores_at(policy, grouped, 32), scores_at(policy, repeated, 32), rtol=1e-12, atol=1e-14)


def test_identical_keys_tie_and_the_newer_stays():
    layer = example_layer(20)
    keys = layer.keys.clone()
    keys[:] = keys[:, :1]
    same = Layer.from_arrays(layer.queries, keys, layer.values, prompt_length=16, scale=1.0, rotation="none")
    for name in ("knorm", "keydiff", "tova:newest=competing"):
        assert kept(name, same, 16, 3) == [[13, 14, 15]] * 2


def test_a_key_of_length_zero_is_no_trouble_to_keydiff():
    layer = example_layer(20)
    keys = layer.keys.clone()
    keys[:, 4] = 0.0
    zero = Layer.from_arrays(layer.queries, keys, layer.values, prompt_length=16, scale=1.0, rotation="none")
    assert scores_at(policy_from_text("keydiff")[1], zero, 16)[:, 4].tolist() == [0.0, 0.0]


def test_nan_in_the_cache_is_found_where_it_is():
    layer = example_layer(20)
    keys = layer.keys.clone()
    keys[1, 7] = math.nan
    broken = Layer.from_arrays(layer.queries, keys, layer.values, prompt_length=16, scale=1.0, rotation="none")
    with pytest.raises(NaNScore, match="row 7 in KV head 1"):
        kept("knorm", broken, 16, 3)


def test_random_streams_differ_by_everything_they_should_and_by_nothing_else():
    def drawn(text="random", seed=0, step=32, **changes):
        layer = example_layer(40, seed=seed, **changes)
        return scores_at(policy_from_text(text)[1], layer, step)

    base = drawn()
    assert torch.equal(base, drawn())
    assert not torch.equal(base[0], base[1])
    assert not torch.equal(base, drawn("random:seed=1"))
    assert not torch.equal(base, drawn(seed=1))  # another prompt
    assert not torch.equal(base[:, :31], drawn(step=31))
    shared = drawn("random:mode=shared")
    assert torch.equal(shared[0], shared[1])
    assert float(base.min()) >= 0
    assert float(base.max()) < 1
    assert abs(float(base.mean()) - 0.5) < 0.12
    sliding = drawn(kind="sliding", window=8)  # a token's number does not depend on its rivals
    assert torch.equal(sliding, base[:, -7:])


@pytest.mark.parametrize("name", [n for n in BUILT_IN if n != "oracle-mass"])
@pytest.mark.parametrize("budget", [1, 5, 16, 31])
def test_no_policy_retains_more_future_mass_than_its_oracle(name, budget):
    layer = example_layer(48, seed=11, dtype=torch.float64)
    mass = scores_at(policy_from_text("oracle-mass")[1], layer, 32)
    best, other = kept("oracle-mass", layer, 32, budget), kept(name, layer, 32, budget)
    assert all(float(mass[h, best[h]].sum()) >= float(mass[h, other[h]].sum()) for h in range(2))


def test_caote_of_a_token_with_all_the_weight_is_infinite_and_with_nearly_all_exact():
    def lonely(logit):
        keys = torch.zeros(1, 6, 1, dtype=torch.float64)
        keys[0, 2] = logit
        values = torch.arange(6, dtype=torch.float64)[None, :, None] + 1e3
        queries = torch.ones(1, 6, 1, dtype=torch.float64)
        return Layer.from_arrays(
            queries, keys, values, prompt_length=5, scale=1.0, rotation="none", dtype=torch.float64
        )

    _, oracle = policy_from_text("oracle-caote")
    assert float(scores_at(oracle, lonely(800.0), 5)[0, 2]) == math.inf
    assert kept("oracle-caote", lonely(800.0), 5, 1) == [[2]]
    close = float(scores_at(oracle, lonely(12.0), 5)[0, 2])  # 1 - a = 3e-5: squared, cancellation would eat it
    share = math.exp(12.0) / (math.exp(12.0) + 5)
    others = (0 + 1 + 3 + 4 + 5) / 5
    assert close == pytest.approx(share**2 * (2 - others) ** 2, rel=1e-6)


def test_oracles_refuse_without_queries_after_the_event():
    layer = example_layer(20)
    for name in ("oracle-mass", "oracle-caote"):
        with pytest.raises(KvtoolError) as caught:
            scores_at(policy_from_text(name)[1], layer, 20)
        assert caught.value.code == "no-queries"


@pytest.mark.parametrize("name", BUILT_IN)
def test_needs_say_what_a_trace_must_hold(name):
    """Each missing thing stops exactly the policies that declare it."""
    _, policy = policy_from_text(name)
    whole = example_layer(30)
    g = whole.geometry
    steps = torch.arange(22, 30)
    arrays = {"keys": whole.keys, "values": whole.values, "prompt_length": 22, "scale": g.scale}
    cos, sin = g.rotation.tables(whole.positions)
    recorded = Rotation(g.rotation.rotary_dims, cos=cos, sin=sin)
    lacking = {
        ("prompt-queries", "recent-queries"): {
            "queries": whole.queries[:, 22:],
            "query_steps": steps,
            "rotation": g.rotation,
        },
        ("rotation",): {"queries": whole.queries, "rotation": None},
        ("future-rotation",): {"queries": whole.queries, "rotation": recorded},
    }
    for needs, given in lacking.items():
        layer = Layer.from_arrays(**arrays, **given)
        if set(needs) & set(policy.needs):
            with pytest.raises(KvtoolError) as caught:
                scores_at(policy, layer, 22)
            assert caught.value.code == "trace-lacks"
        else:
            assert scores_at(policy, layer, 22).shape == (2, 22)


def test_recent_queries_are_enough_for_those_that_look_at_few():
    whole = example_layer(30)
    part = Layer.from_arrays(
        whole.queries[:, 18:], whole.keys, whole.values, prompt_length=22, scale=0.4, query_steps=torch.arange(18, 30)
    )
    assert scores_at(policy_from_text("snapkv:window=4")[1], part, 22).shape == (2, 22)
    assert scores_at(policy_from_text("tova")[1], part, 22).shape == (2, 22)
    with pytest.raises(KvtoolError, match="queries of steps"):
        scores_at(policy_from_text("snapkv:window=5")[1], part, 22)


def test_the_projected_value_factor_needs_an_output_projection():
    whole = example_layer(30)
    bare = Layer.from_arrays(
        whole.queries, whole.keys, whole.values, prompt_length=22, scale=0.4, rotation=whole.geometry.rotation
    )
    with pytest.raises(KvtoolError, match="no output projection") as caught:
        scores_at(policy_from_text("expected-attention:value=projected")[1], bare, 22)
    assert caught.value.code == "trace-lacks"


def test_identical_queries_leave_a_covariance_of_rank_zero_and_finite_scores():
    layer = example_layer(20)
    queries = layer.queries.clone()
    queries[:] = queries[:, :1]
    flat = Layer.from_arrays(queries, layer.keys, layer.values, prompt_length=16, scale=1.0, rotation="none")
    for text in ("expected-attention:sinks=0", "jacap", "jacap:ridge=relative,response=full", "capkv:exclude_first=0"):
        scores = scores_at(policy_from_text(text)[1], flat, 16)
        assert bool(scores.isfinite().all())
    assert float(scores_at(policy_from_text("jacap")[1], flat, 16).abs().max()) < 1e-25


def test_the_shift_moves_ranks_under_a_fixed_ridge_and_not_under_a_relative_one():
    layer = example_layer(40, dtype=torch.float64, mean_query=3.0)

    def order(text):
        return scores_at(policy_from_text(text)[1], layer, 32)

    relative = [order(f"capkv:ridge=relative,weight_eps=0,relevance=exp_dot,shift={s}") for s in ("max", "none")]
    assert torch.allclose(relative[0], relative[1], rtol=1e-9, atol=0)
    fixed = [order(f"capkv:weight_eps=0,relevance=exp_dot,shift={s}") for s in ("max", "none")]
    assert not torch.equal(fixed[0].argsort(1), fixed[1].argsort(1))


@pytest.mark.parametrize(
    "text",
    [
        "snapkv:kernel=4",
        "snapkv:window=0",
        "snapkv:pooling=median",
        "tova:heads=all",
        "h2o:recent=1.5",
        "h2o:group=median",
        "random:seed=-1",
        "keydiff:anchor=first",
        "streaming-llm:sinks=-1",
        "expected-attention:horizon=0",
        "expected-attention:epsilon=nan",
        "jacap:tau=0",
        "jacap:ridge=-1",
        "jacap:ridge=big",
        "jacap:relevance=ones",
        "capkv:sensitivity=saturating",
        "capkv:weight_eps=-1",
        "knorm:layers=2",
    ],
)
def test_wrong_parameters_are_refused(text):
    with pytest.raises(KvtoolError) as caught:
        policy_from_text(text)
    assert caught.value.code == "policy-parameter"


def test_wrong_choices_are_refused_in_python_too():
    from kvtool.policies.capacity import Capacity
    from kvtool.policies.snapkv import SnapKV

    with pytest.raises(ValueError, match="pooling=median should be one of avg, max"):
        SnapKV(pooling="median")
    with pytest.raises(ValueError, match="ridge=none should be one of identity, relative"):
        Capacity(ridge="none")
