"""What can go wrong in the capacity family: refusals, causality, factorisations, odd data."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtool.budget import Budget
from kvtool.errors import KvtoolError
from kvtool.layer import Gradients
from kvtool.policies import Protection, policy_from_text
from kvtool.policies.capacity import Capacity
from kvtool.replay import replay
from kvtool.replay.decide import decide
from kvtool.replay.serving import missing_for
from kvtool.testing import check_policy, example_layer, scores_at
from kvtool.view import View

POINTS = [
    "capacity:tau=1,ridge=relative",
    "capacity:statistics=window:9,response=full",
    "capacity:statistics=ema:0.8,tau=2",
    "capacity:statistics=mixture:3",
    "capacity:statistics=mixture:2,mixture_combine=worst,relevance=exp_cosine,sensitivity=none",
    "capacity:statistics=future",
    "capacity:competition=centred",
    "capacity:competition=centred,response=none,exclude_first=3,leverage=false",
    "capacity:directions=outputs,exclude_first=2",
    "capacity:directions=fisher,ridge=relative",
    "capacity:competition=centred,directions=outputs,response=full,selector=greedy",
    "capacity:blend=0.5",
    "capacity:blend=0,floor=leave_one_out",
    "capacity:group_stage=weight,group=max",
    "capacity:selector=two_pass,weight_eps=0.1",
    "capacity:selector=greedy,group=max",
    "capacity:selector=exhaustive",
    "capkv-paper:tau=50",
    "capkv:relevance=exp_dot,shift=none,tau=1e6",
    "capkv:relevance=exp_dot,shift=none,tau=1e6,fallback=no_leverage",
]


def policy(text):
    return policy_from_text(text)[1]


@pytest.mark.parametrize("text", POINTS)
def test_points_of_the_family_conform(text):
    assert check_policy(policy(text)) is None
    assert policy(text) == policy(text)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("statistics=past", r"statistics=past should be one of rope_mean, prompt, window\[:n\], ema\[:beta\], mixture"),
        ("statistics=prompt:3", "should be one of"),
        ("statistics=window:0", "whole number above 0, such as window:256"),
        ("statistics=window:2.5", "whole number above 0"),
        ("statistics=ema:1", "between 0 and 1"),
        ("statistics=ema:nan", "between 0 and 1"),
        ("statistics=mixture:-1", "whole number above 0"),
        ("competition=full", "should be one of diagonal, centred"),
        ("directions=keys", "should be one of values, outputs, fisher"),
        ("selector=lazy", "should be one of one_shot, two_pass, greedy, exhaustive"),
        ("floor=mean", "should be one of history, leave_one_out"),
        ("group_stage=value", "should be one of score, weight"),
        ("mixture_combine=max", "should be one of mean, worst, assigned"),
        ("fallback=none", "should be one of knorm, no_leverage"),
        ("blend=1.5", "should lie in 0..1"),
        ("blend=nan", "finite"),
        ("fisher_steps=0", "at least 1"),
        ("competition=centred,sensitivity=none", "it needs sensitivity=saturating"),
        ("competition=centred,statistics=mixture", "one centre"),
        ("group_stage=weight,competition=centred", "must share their directions"),
        ("group_stage=weight,directions=outputs", "must share their directions"),
        ("selector=greedy,leverage=false", "one by one"),
        ("selector=exhaustive,group=max", "needs group=mean"),
    ],
)
def test_what_is_wrong_or_means_nothing_is_refused_in_one_sentence(text, sentence):
    with pytest.raises(KvtoolError, match=sentence) as caught:
        policy_from_text(f"capacity:{text}")
    assert caught.value.code == "policy-parameter"
    assert "\n" not in caught.value.message


def test_one_choice_has_one_spelling():
    assert policy("capacity:statistics=window:256") == policy("capacity:statistics=window")
    assert policy("capacity:statistics=ema:0.990") == policy("capacity:statistics=ema")
    assert policy("capacity:statistics=mixture:04").statistics == "mixture"
    assert Capacity(statistics="ema:0.9").statistics == "ema:0.9"


def test_needs_follow_the_choices():
    assert policy("capacity").needs == ("prompt-queries", "rotation", "future-rotation")
    assert policy("capacity:statistics=future").needs == ()
    assert policy("capacity:statistics=ema").needs == ("prompt-queries",)
    window = policy("capacity:statistics=window:6,directions=outputs")
    assert window.needs == ("recent-queries", "output-projection")
    assert [window.queries_back(step) for step in (3, 50)] == [3, 6]
    assert policy("capacity:statistics=window:6,blend=0.5").queries_back(50) == 50
    assert "prompt-gradients" in policy("capacity:directions=fisher").needs


@pytest.mark.parametrize("text", [t for t in POINTS if "future" not in t])
def test_the_future_changes_nothing(text):
    layer = example_layer(40, seed=3, sinks=True)
    other = example_layer(40, seed=3, sinks=True)
    for name in ("queries", "keys", "values", "output_gradients"):
        getattr(other, name)[..., 30:, :] = torch.nan
    if "exhaustive" in text:
        assert torch.equal(scores_at(policy(text), layer, 30), scores_at(policy(text), other, 30))
        return
    sets = [
        decide(x, "it", policy(text), [Budget.from_tokens(11)], 30, Protection(1, 4), torch.arange(30, 40))[
            0
        ].evict_step
        for x in (layer, other)
    ]
    assert torch.equal(*sets)


@pytest.mark.parametrize("text", ["capacity", "capacity:blend=0.5", "capacity:statistics=mixture:2,selector=greedy"])
def test_a_view_of_other_tokens_that_shares_the_memo_is_scored_anew(text):
    layer, chosen = example_layer(40, seed=5), policy(text)
    whole = View.at(layer, 30)
    before = chosen.score(chosen.observe(chosen.start(layer.geometry), whole.past()), whole)
    rows = torch.tensor([[1, 4, 9, 22, 28], [0, 3, 11, 12, 29]])
    part = dataclasses.replace(whole, tokens=rows, evict_step=torch.full_like(rows, 40))
    alone = View(layer, 30, rows, 30, torch.full_like(rows, 40))
    state = chosen.observe(chosen.start(layer.geometry), whole.past())
    assert torch.equal(chosen.score(state, part), chosen.score(state, alone))
    assert torch.equal(chosen.objective(part).weights, chosen.objective(alone).weights)
    assert torch.equal(chosen.score(state, whole), before)


def test_statistics_of_the_future_do_change():
    layer, other = example_layer(40, seed=3), example_layer(40, seed=3)
    other.queries[:, 30:] += 1.0
    chosen = policy("capacity:statistics=future")
    assert not torch.equal(scores_at(chosen, layer, 30), scores_at(chosen, other, 30))


def with_gradients(layer, first, stop, targets, block):
    told = Gradients(2, block, "all", targets, targets[1] - targets[0], 0)
    loaders = dict(layer.loaders)
    if stop is not None:
        stored = layer.output_gradients[:, :, first:stop]
        loaders["output_gradients"] = lambda: stored
    return dataclasses.replace(layer, loaders=loaders, gradients=told, gradient_steps=torch.arange(first, stop))


@pytest.mark.parametrize(
    ("first", "stop", "targets", "block", "why"),
    [
        (0, 30, (0, 30), 30, None),
        (0, 40, (0, 30), 40, None),  # later steps have gradients, but no target after the event was drawn
        (0, 40, (0, 40), 10, None),  # a block ends at the event
        (0, 40, (0, 40), 40, "know targets at or after the event at step 30"),
        (0, 40, (0, 31), 40, "know targets at or after the event at step 30"),
        (0, 40, (0, 40), 20, "know targets at or after the event at step 30"),
        (30, 40, (30, 40), 10, "no gradient of a step before the event"),
        (0, 40, (30, 40), 10, "no gradient of a step before the event"),
    ],
)
def test_fisher_reads_no_gradient_that_knows_the_future(first, stop, targets, block, why):
    layer = with_gradients(example_layer(40), first, stop, targets, block)
    chosen = policy("capacity:directions=fisher")
    assert (missing_for(chosen, layer, 30) is None) == (why is None)
    if why is None:
        assert View.at(layer, 30).gradients(7).shape == (2, 4, 7, 6)
        assert torch.equal(View.at(layer, 30).gradients(7), layer.output_gradients[:, :, 23:30])
        assert bool(scores_at(chosen, layer, 30).isfinite().all())
        return
    with pytest.raises(KvtoolError, match=why) as caught:
        scores_at(chosen, layer, 30)
    assert caught.value.code == "trace-lacks"
    assert why in missing_for(chosen, layer, 30)


def test_a_trace_without_gradients_is_refused_for_fisher():
    with pytest.raises(KvtoolError, match="has no gradients in this trace") as caught:
        replay("sample_traces/tiny-gqa.zarr", ["capacity:directions=fisher"], ratios=["0.5"])
    assert caught.value.code == "trace-lacks"
    with pytest.raises(KvtoolError, match="no gradient of a step before the event"):
        replay("sample_traces/smollm2-gradients.zarr", ["capacity:directions=fisher"], ratios=["0.5"], layers=[0])


def test_a_matrix_without_a_factor_falls_back_and_says_so(tmp_path):
    layer = example_layer(40)
    chosen = policy("capkv:relevance=exp_dot,shift=none,tau=1e6")
    view = View.at(layer, 32)
    scores = chosen.score(None, view)
    assert torch.equal(scores, -layer.keys[:, :32].double().norm(dim=-1))
    assert chosen.diagnose(None, view)["fallback"].tolist() == [1.0] * 4
    twice = policy("capkv:relevance=exp_dot,shift=none,tau=1e6,fallback=no_leverage")
    view = View.at(layer, 32)
    assert torch.equal(twice.score(None, view), scores)  # the weights themselves overflow, so key norms it is
    assert twice.diagnose(None, view)["fallback"].tolist() == [2.0] * 4
    assert chosen.objective(View.at(layer, 32)) is None
    text = "capkv:relevance=exp_dot,shift=none,tau=1e6,selector=greedy"
    found = replay("sample_traces/tiny-gqa.zarr", [text], ratios=["0.5"], layers=[0])
    assert any("could not factor a matrix in 2 of 2" in w for w in found.warnings)
    assert any(row["fallback"] == 1.0 for row in found.entries("rows"))


def test_weights_beyond_double_precision_need_jitter_and_say_so():
    """A token of weight 1e200 beside others of weight 1: finite, but no factorisation can hold both."""
    layer = example_layer(40, dtype=torch.float64, sinks=False)
    layer.keys[:, 5] *= 400.0
    chosen = policy("capkv-paper:tau=3")
    view = View.at(layer, 32)
    assert bool(chosen.score(None, view).isfinite().all())
    told = chosen.diagnose(None, view)
    assert bool(((told["jitter"] > 0) | (told["fallback"] > 0)).any())


@pytest.mark.parametrize(("size", "code"), [(4.4e153, 1.0), (1e160, 2.0)])
def test_without_leverage_the_fallback_is_the_weighted_norm_while_that_is_finite(size, code):
    """Squares of 4.4e153 are finite, the sum of 32 of them is not; squares of 1e160 are not either."""
    layer = example_layer(40, dtype=torch.float64, query_heads=2)
    layer.values[:] = size
    text = "capacity:relevance=ones,sensitivity=none,response=none,fallback="
    chosen, view = policy(f"{text}no_leverage"), View.at(layer, 32)
    scores = chosen.score(None, view)
    assert chosen.diagnose(None, view)["fallback"].tolist() == [code] * 2
    norms = -layer.keys[:, :32].norm(dim=-1)
    assert torch.allclose(scores, torch.full_like(scores, 6 * size**2) if code == 1.0 else norms, rtol=1e-12)
    assert torch.allclose(scores_at(policy(f"{text}knorm"), layer, 32), norms, rtol=1e-12)


SHAPES = {
    "seed": st.integers(0, 10_000),
    "step": st.integers(1, 12),
    "group": st.integers(1, 4),
    "kv_heads": st.integers(1, 3),
    "key_dim": st.sampled_from([4, 8, 12]),
    "value_dim": st.sampled_from([1, 3, 8]),
    "stored": st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    "softcap": st.sampled_from([None, 1.5]),
    "sinks": st.booleans(),
    "oddity": st.sampled_from(["none", "ties", "collinear", "dominant", "zero"]),
    "text": st.sampled_from(
        [
            "capacity",
            "capkv",
            "capkv-paper",
            "capacity:tau=1,competition=centred",
            "capacity:tau=1,competition=centred,response=full,directions=outputs",
            "capacity:tau=1,ridge=relative,directions=fisher",
            "capacity:statistics=mixture:3,mixture_combine=worst",
            "capacity:statistics=ema:0.7,group_stage=weight",
            "capacity:tau=1,selector=greedy,blend=0.4",
            "capacity:tau=1,selector=two_pass,blend=0.4,floor=leave_one_out",
        ]
    ),
}


@given(**SHAPES)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_weights_matrices_and_scores_are_sound_whatever_the_data(
    seed, step, group, kv_heads, key_dim, value_dim, stored, softcap, sinks, oddity, text
):
    layer = example_layer(
        16,
        seed=seed,
        query_heads=group * kv_heads,
        kv_heads=kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        stored=stored,
        softcap=softcap,
        sinks=sinks,
    )
    if oddity == "ties":
        layer.keys[:], layer.values[:] = layer.keys[:, :1], layer.values[:, :1]
    elif oddity == "collinear":
        layer.values[:] = layer.values[:, :1] * torch.arange(1, 17)[:, None]
    elif oddity == "dominant":
        layer.keys[:, 0] *= 1000.0
    elif oddity == "zero":
        layer.values[:] = 0.0
    chosen, view = policy(text), View.at(layer, step)
    weights = chosen._weights(view).weights
    assert bool((weights >= 0).all())
    for head in range(kv_heads):
        pool = chosen._pool(view, head)
        if not bool(pool.weights.isfinite().all()):
            continue
        assert bool((pool.ridge > 0).all())
        for h in range(len(pool.weights)):
            u = pool.directions[h % len(pool.directions)].double()
            a = pool.ridge[h] * torch.eye(u.shape[1], dtype=torch.float64) + u.T @ (pool.weights[h][:, None] * u)
            assert float((a - a.T).abs().max()) <= 1e-14 * float(a.abs().max())
            values = torch.linalg.eigvalsh(a)
            assert float(values.min()) > -1e-12 * float(values.max())
    scores = scores_at(chosen, layer, step)
    assert bool(scores.isfinite().all())
    kept = max(1, step // 2)
    (decided,) = decide(layer, "it", chosen, [Budget.from_tokens(kept)], step, Protection(1, 1), torch.arange(step, 16))
    assert (decided.evict_step[:, :step] == 16).sum(1).tolist() == [kept] * kv_heads
