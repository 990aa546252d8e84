"""Every axis of the capacity family against its formula, one token at a time, in float64 to 1e-12."""

import dataclasses
import math

import pytest
import torch

from kvtool.policies import policy_from_text
from kvtool.testing import example_layer, scores_at
from kvtool.view import View

STEP = 20
LAYERS = {
    "grouped": {"seed": 1},
    "one KV head": {"seed": 3, "kv_heads": 1},
    "sinks": {"seed": 6, "sinks": True},
    "softcap": {"seed": 7, "softcap": 0.8},
    "no rotation, wide values": {"seed": 8, "rotation": "none", "value_dim": 11},
    "all at once": {"seed": 9, "kind": "sliding", "window": 13, "sinks": True, "softcap": 1.3},
}


@pytest.fixture(params=LAYERS, name="layer")
def _layer(request):
    return example_layer(26, dtype=torch.float64, stored=torch.float64, **LAYERS[request.param])


def policy(text):
    return policy_from_text(text)[1]


def sink_of(layer, head):
    return None if layer.geometry.sink_logits is None else float(layer.geometry.sink_logits[head])


def soft_logits(layer, mean, keys):
    """Lists: capped logits, and keys times the cap's slope."""
    g, z, soft = layer.geometry, [], []
    for k in keys:
        x, slope = g.scale * float(mean @ k), 1.0
        if g.softcap is not None:
            x = g.softcap * math.tanh(x / g.softcap)
            slope = 1 - (x / g.softcap) ** 2
        z.append(x)
        soft.append(slope * k)
    return z, soft


def attention(z, tau, sink):
    below = math.fsum(math.exp(x / tau) for x in z) + (0.0 if sink is None else math.exp(sink / tau))
    return [math.exp(x / tau) / below for x in z], 0.0 if sink is None else math.exp(sink / tau) / below


def weights_by_hand(layer, mean, cov, keys, sink, tau=1.0, response="diagonal"):
    """Saturating weights, token by token."""
    z, soft = soft_logits(layer, mean, keys)
    a, _ = attention(z, tau, sink)
    lam = torch.diag(cov.diagonal()) if response == "diagonal" else cov
    s = layer.geometry.scale
    return [s**2 * (x * (1 - x)) ** 2 * float(k @ lam @ k) for x, k in zip(a, soft, strict=True)]


def leverage_by_hand(u, w, ridge=1.0, more=0.0):
    a = ridge * torch.eye(len(u[0]), dtype=torch.float64) + more
    for x, weight in zip(u, w, strict=True):
        a = a + weight * torch.outer(x, x)
    inverse = torch.linalg.inv(a)
    return torch.tensor(
        [float(weight * (x @ inverse @ x)) for x, weight in zip(u, w, strict=True)], dtype=torch.float64
    )


def close(found, expected):
    return float((found - expected).abs().max()) <= 1e-12 * float(expected.abs().max())


def by_kv_head(layer, score):
    """[Hk, N]: mean over the group of score(query head, values, keys)."""
    view = View.at(layer, STEP)
    heads = [
        score(h, list(view.values[h // view.geometry.group]), list(view.keys[h // view.geometry.group]))
        for h in range(view.geometry.query_heads)
    ]
    return torch.stack(heads).view(view.geometry.kv_heads, view.geometry.group, -1).mean(1)


def test_capacity_without_parameters_is_jacap(layer):
    assert torch.equal(scores_at(policy("capacity"), layer, STEP), scores_at(policy("jacap"), layer, STEP))
    same = "capacity:relevance=exp_cosine,tau=5,sensitivity=none,response=none,weight_eps=1e-6,exclude_first=4"
    assert torch.equal(scores_at(policy(same), layer, STEP), scores_at(policy("capkv"), layer, STEP))
    paper = "capkv:relevance=exp_dot,shift=none,weight_eps=0,exclude_first=0,exclude_statistics=0"
    assert torch.equal(scores_at(policy(paper), layer, STEP), scores_at(policy("capkv-paper"), layer, STEP))


STATISTICS = {
    "prompt": lambda q: (q[4:], [1] * (len(q) - 4)),
    "window:7": lambda q: (q[-7:], [1] * 7),
    "window:999": lambda q: (q[4:], [1] * (len(q) - 4)),
}


@pytest.mark.parametrize("source", STATISTICS)
@pytest.mark.parametrize("response", ["diagonal", "full"])
def test_statistics_of_the_past_as_it_was_used(layer, source, response):
    def score(h, values, keys):
        queries, _ = STATISTICS[source](list(layer.queries[h, :STEP]))
        mean = sum(queries) / len(queries)
        cov = sum(torch.outer(q - mean, q - mean) for q in queries) / len(queries)
        return leverage_by_hand(values, weights_by_hand(layer, mean, cov, keys, sink_of(layer, h), 1.0, response))

    found = scores_at(policy(f"capacity:tau=1,statistics={source},response={response}"), layer, STEP)
    assert close(found, by_kv_head(layer, score))


@pytest.mark.parametrize("beta", [0.5, 0.9, 0.99])
def test_the_moving_average_is_the_recursion(layer, beta):
    """Diagonal first and second moments, corrected for their start at zero."""

    def score(h, values, keys):
        m = torch.zeros(layer.geometry.key_dim, dtype=torch.float64)
        second, n = m.clone(), 0
        for q in layer.queries[h, 4:STEP]:
            m, second, n = beta * m + (1 - beta) * q, beta * second + (1 - beta) * q * q, n + 1
        m, second = m / (1 - beta**n), second / (1 - beta**n)
        cov = torch.diag((second - m * m).clamp_min(1e-6))
        return leverage_by_hand(values, weights_by_hand(layer, m, cov, keys, sink_of(layer, h)))

    assert close(scores_at(policy(f"capacity:tau=1,statistics=ema:{beta}"), layer, STEP), by_kv_head(layer, score))


def test_the_moving_average_has_a_floor_where_queries_agree():
    layer = example_layer(26, dtype=torch.float64)
    layer.queries[:, 4:] = 2.0
    for beta in (0.5, 0.9, 0.999):
        found = policy(f"capacity:response=full,statistics=ema:{beta}").query_statistics(View.at(layer, STEP))
        assert float((found.mean - 2.0).abs().max()) < 1e-12
        assert float((found.covariance - 1e-6 * torch.eye(8, dtype=torch.float64)).abs().max()) < 1e-15


def test_the_future_is_its_own_queries_and_an_oracle(layer):
    chosen = policy("capacity:tau=1,statistics=future")
    assert chosen.oracle
    assert not policy("capacity").oracle

    def score(h, values, keys):
        queries = list(layer.queries[h, STEP:])
        mean = sum(queries) / len(queries)
        cov = sum(torch.outer(q - mean, q - mean) for q in queries) / len(queries)
        return leverage_by_hand(values, weights_by_hand(layer, mean, cov, keys, sink_of(layer, h)))

    assert close(scores_at(chosen, layer, STEP), by_kv_head(layer, score))


def kinds_by_hand(queries, turn, labels):
    for label in sorted(set(labels)):
        members = [turn @ q for q, own in zip(queries, labels, strict=True) if own == label]
        mean = sum(members) / len(members)
        yield len(members) / len(queries), mean, sum(torch.outer(q - mean, q - mean) for q in members) / len(members)


@pytest.mark.parametrize("combine", ["mean", "worst"])
def test_a_mixture_weighs_by_every_kind_of_query(layer, combine):
    """Queries of two kinds that no clustering can miss; one alternates with the other."""
    signs = torch.tensor([1.0 if t % 3 else -1.0 for t in range(26)], dtype=torch.float64)
    view = View.at(layer, STEP)
    rotation, rows = view.rotation, torch.arange(26)
    far = torch.full((26, layer.geometry.key_dim), 9.0, dtype=torch.float64) * signs[:, None]
    shift = far if rotation is None else rotation.rotate(far, layer.positions, rows)
    layer.queries[:] += shift
    turn = torch.eye(8, dtype=torch.float64)
    if rotation is not None:
        turn = rotation.mean_matrix(view.next_positions(512), 8)

    def score(h, values, keys):
        queries = list(view.unrotated_queries(4, STEP)[h])
        several = [
            (share, weights_by_hand(layer, mean, cov, keys, sink_of(layer, h)))
            for share, mean, cov in kinds_by_hand(queries, turn, [float(x) for x in signs[4:STEP]])
        ]
        assert len(several) == 2
        columns = list(zip(*(w for _, w in several), strict=True))
        if combine == "worst":
            return leverage_by_hand(values, [max(c) for c in columns])
        return leverage_by_hand(values, [sum(s * x for (s, _), x in zip(several, c, strict=True)) for c in columns])

    text = f"capacity:tau=1,statistics=mixture:2,mixture_combine={combine}"
    assert close(scores_at(policy(text), layer, STEP), by_kv_head(layer, score))


def test_a_mixture_of_one_is_the_mean_and_its_whole_is_too(layer):
    view = View.at(layer, STEP)
    plain = scores_at(policy("capacity"), layer, STEP)
    assert torch.allclose(scores_at(policy("capacity:statistics=mixture:1"), layer, STEP), plain, rtol=1e-12, atol=0)
    whole, one = (policy(f"capacity:statistics={s}").query_statistics(view) for s in ("mixture:3", "rope_mean"))
    assert torch.equal(whole.mean, one.mean)
    assert torch.equal(whole.covariance, one.covariance)


def test_more_kinds_than_queries_is_no_trouble():
    layer = example_layer(26, dtype=torch.float64)
    layer.queries[:] = layer.queries[:, :1]
    for step in (1, 2, 3, 20):
        assert bool(scores_at(policy("capacity:statistics=mixture:9"), layer, step).isfinite().all())


@pytest.mark.parametrize("response", ["diagonal", "full"])
def test_centred_is_the_jacobian_without_cross_responses(layer, response):
    """U S diag(Kc Lambda Kc^T) S U^T with S = diag(a) - a a^T formed explicitly, the sink as one more token."""
    chosen = policy(f"capacity:tau=1,competition=centred,response={response},ridge=0.01")
    expected_queries = chosen.query_statistics(View.at(layer, STEP))
    scale = layer.geometry.scale

    def score(h, values, keys):
        mean, lam = expected_queries.mean[h], expected_queries.covariance[h]
        z, soft = soft_logits(layer, mean, keys)
        a, a_sink = attention(z, 1.0, sink_of(layer, h))
        a, u, k = (
            torch.tensor([*a, a_sink], dtype=torch.float64),
            torch.stack([*values, 0 * values[0]]),
            torch.stack([*soft, 0 * soft[0]]),
        )
        centre = (a[:, None] * k).sum(0)
        s = torch.diag(a) - torch.outer(a, a)
        inner = torch.diag(torch.stack([(x - centre) @ lam @ (x - centre) for x in k]))
        brute = scale**2 * u.T @ s @ inner @ s @ u
        matrix = 0.01 * torch.eye(len(brute), dtype=torch.float64) + brute
        inverse = torch.linalg.inv(matrix)
        ubar = (a[:, None] * u).sum(0)
        weights = [scale**2 * float(a[i] ** 2 * inner[i, i]) for i in range(len(values))]
        moved = [v - ubar for v in values]
        return torch.tensor(
            [w * float(v @ inverse @ v) for w, v in zip(weights, moved, strict=True)], dtype=torch.float64
        )

    assert close(scores_at(chosen, layer, STEP), by_kv_head(layer, score))


def shifted_keys(layer, by):
    moved = dataclasses.replace(layer)
    moved.queries[:], moved.keys[:] = layer.queries, layer.keys + by
    return moved


@pytest.mark.parametrize("sink", [None, -400.0])
def test_centred_does_not_mind_a_common_shift_of_the_keys_and_diagonal_does(sink):
    """With a sink logit only where the sink has no weight: it has no key, so no shift is common to it."""
    layer = example_layer(26, dtype=torch.float64, stored=torch.float64, seed=1)
    if sink is not None:
        layer = dataclasses.replace(
            layer, geometry=dataclasses.replace(layer.geometry, sink_logits=torch.full((4,), sink))
        )
    moved = shifted_keys(layer, 3.0 * torch.randn(8, generator=torch.Generator().manual_seed(3), dtype=torch.float64))
    for response in ("diagonal", "full"):
        text = f"capacity:tau=1,ridge=0.1,response={response},competition="
        centred = [scores_at(policy(f"{text}centred"), x, STEP) for x in (layer, moved)]
        assert close(*centred)
        diagonal = [scores_at(policy(f"{text}diagonal"), x, STEP) for x in (layer, moved)]
        assert float((diagonal[0] / diagonal[1] - 1).abs().max()) > 0.5


@pytest.mark.parametrize("competition", ["diagonal", "centred"])
def test_outputs_equal_an_explicit_product_with_the_projection(layer, competition):
    """A in the model's width M, by Woodbury-free brute force: (ridge I + sum w x x^T)^-1 with x = W_O v."""
    base = f"capacity:tau=1,competition={competition},ridge=0.05"
    found = scores_at(policy(f"{base},directions=outputs"), layer, STEP)
    view = View.at(layer, STEP)
    plain = policy(base)._weights(view)

    def score(h, values, keys):
        u = [v @ layer.output_projection[h] for v in values]  # [M]
        more = 0.0
        if competition == "centred":
            centre = sum(a * x for a, x in zip(plain.attention[h], u, strict=True))
            u = [x - centre for x in u]
            more = plain.sink[h] * torch.outer(centre, centre)
        return leverage_by_hand(u, plain.weights[h].tolist(), 0.05, more)

    assert float((found - by_kv_head(layer, score)).abs().max()) < 1e-11


def test_outputs_are_values_where_the_projection_only_turns():
    layer = example_layer(26, dtype=torch.float64, stored=torch.float64, seed=2, value_dim=6)
    for h in range(4):
        turned = torch.linalg.qr(torch.randn(10, 10, generator=torch.Generator().manual_seed(h), dtype=torch.float64)).Q
        layer.output_projection[h] = turned[:6]
    for more in ("", ",competition=centred", ",selector=greedy", ",leverage=false"):
        found = [scores_at(policy(f"capacity:tau=1{more},directions={d}"), layer, STEP) for d in ("outputs", "values")]
        assert close(*found)


def test_fisher_directions_are_lengths_in_the_gradients(layer):
    """u^T A^-1 u with u = Gamma^(1/2) v, Gamma the mean of g g^T of the newest steps before the event."""
    found = scores_at(policy("capacity:tau=1,ridge=1e-4,directions=fisher,fisher_steps=5"), layer, STEP)
    weights = policy("capacity:tau=1")._weights(View.at(layer, STEP)).weights

    def score(h, values, keys):
        g = [layer.output_gradients[draw, h, t] for draw in range(2) for t in range(STEP - 5, STEP)]
        gamma = sum(torch.outer(x, x) for x in g) / len(g)
        a = 1e-4 * torch.eye(len(gamma), dtype=torch.float64)
        values_, vectors = torch.linalg.eigh(gamma)
        root = vectors @ torch.diag(values_.clamp_min(0).sqrt()) @ vectors.T
        u = [root @ v for v in values]
        for x, w in zip(u, weights[h].tolist(), strict=True):
            a = a + w * torch.outer(x, x)
        inverse = torch.linalg.inv(a)
        found_ = [w * float(x @ inverse @ x) for x, w in zip(u, weights[h].tolist(), strict=True)]
        return torch.tensor(found_, dtype=torch.float64)

    assert float((found - by_kv_head(layer, score)).abs().max()) < 1e-11


@pytest.mark.parametrize("floor", ["history", "leave_one_out"])
def test_blending_in_what_the_past_found(layer, floor):
    """w~ = W (blend w / W + (1 - blend) g / sum g), g by loops over every past query."""
    view, g = View.at(layer, STEP), layer.geometry
    plain = policy("capacity:tau=1")._weights(view).weights
    rows = view.tokens[0].tolist()
    past = range(STEP) if floor == "history" else rows

    def found_by(h):
        total = torch.zeros(STEP, dtype=torch.float64)
        for t in range(STEP):
            seen = [i for i in past if int(g.first_visible(torch.tensor(t))) <= i <= t]
            if not seen:
                continue
            z, _ = soft_logits(layer, layer.queries[h, t], [layer.keys[h // g.group, i] for i in seen])
            a, _ = attention(z, 1.0, sink_of(layer, h))
            values = [layer.values[h // g.group, i] for i in seen]
            output = sum(x * v for x, v in zip(a, values, strict=True))
            for i, x in zip(seen, a, strict=True):
                if floor == "history":
                    total[i] += x
                    continue
                rest = [j for j in seen if j != i]
                z, _ = soft_logits(layer, layer.queries[h, t], [layer.keys[h // g.group, j] for j in rest])
                b, _ = attention(z, 1.0, sink_of(layer, h)) if rest else ([], 0.0)
                without = sum((y * layer.values[h // g.group, j] for j, y in zip(rest, b, strict=True)), 0 * output)
                total[i] += float((output - without).square().sum())
        return total[rows]

    def score(h, values, keys):
        share = found_by(h)
        w = 0.3 * plain[h] + 0.7 * plain[h].sum() * share / share.sum()
        assert float(w.sum()) == pytest.approx(float(plain[h].sum()), rel=1e-12)
        return leverage_by_hand(values, w.tolist())

    found = scores_at(policy(f"capacity:tau=1,blend=0.3,floor={floor}"), layer, STEP)
    assert float((found / by_kv_head(layer, score) - 1).abs().max()) < 1e-10


def test_blend_one_is_exactly_off(layer):
    plain = scores_at(policy("capacity"), layer, STEP)
    for floor in ("history", "leave_one_out"):
        assert torch.equal(scores_at(policy(f"capacity:blend=1,floor={floor}"), layer, STEP), plain)
        assert not torch.equal(scores_at(policy(f"capacity:blend=0.999,floor={floor}"), layer, STEP), plain)


@pytest.mark.parametrize("group", ["mean", "max"])
def test_one_matrix_per_kv_head(layer, group):
    view, g = View.at(layer, STEP), layer.geometry
    weights = policy("capacity:tau=1")._weights(view).weights.view(g.kv_heads, g.group, -1)
    for head in range(g.kv_heads):
        merged = weights[head].mean(0) if group == "mean" else weights[head].amax(0)
        ridge = float(merged.mean())
        expected = leverage_by_hand(list(view.values[head]), merged.tolist(), ridge)
        text = f"capacity:tau=1,group_stage=weight,group={group},ridge=relative"
        assert close(scores_at(policy(text), layer, STEP)[head], expected)


def test_a_relative_ridge_does_not_see_the_scale_of_the_weights():
    """Queries ten times as spread have a hundred times the response, at the same mean."""
    layer = example_layer(40, dtype=torch.float64, stored=torch.float64, rotation="none")
    wide = example_layer(40, dtype=torch.float64, stored=torch.float64, rotation="none")
    mean = layer.queries[:, 4:32].mean(1, keepdim=True)
    wide.queries[:] = mean + 10 * (layer.queries - mean)
    for more in ("", ",competition=centred", ",group_stage=weight", ",directions=outputs"):
        relative, fixed = (
            [scores_at(policy(f"capacity:tau=1,ridge={ridge}{more}"), x, 32) for x in (layer, wide)]
            for ridge in ("relative", "identity")
        )
        assert float((relative[0] / relative[1] - 1).abs().max()) < 1e-9
        assert float((fixed[0] / fixed[1] - 1).abs().max()) > 0.5


def test_every_policy_tells_the_queries_it_expects(layer):
    """Diagonal where the policy reads no more; none where a policy expects nothing in particular."""
    view = View.at(layer, STEP)
    found = {t: policy(t).query_statistics(view) for t in ("capacity", "capacity:response=full", "capkv", "knorm")}
    assert found["knorm"] is None
    assert policy("knorm").objective(view) is None
    full = found["capacity:response=full"]
    assert torch.equal(found["capkv"].covariance, full.covariance)
    assert torch.equal(found["capacity"].covariance, torch.diag_embed(full.variance))
    expected = policy("expected-attention").query_statistics(view)
    assert torch.equal(expected.mean, full.mean)
    assert torch.equal(expected.covariance, full.covariance)
