"""Every policy against its own formula, one token and one query at a time, in float64 to 1e-12."""

import math

import pytest
import torch

from kvtool.policies import policy_from_text
from kvtool.testing import example_layer, scores_at

STEP = 20
LAYERS = {
    "grouped": {"seed": 1},
    "no groups": {"seed": 2, "query_heads": 3, "kv_heads": 3},
    "one KV head": {"seed": 3, "kv_heads": 1},
    "sliding": {"seed": 4, "kind": "sliding", "window": 9},
    "chunked": {"seed": 5, "kind": "chunked", "window": 8},
    "sinks": {"seed": 6, "sinks": True},
    "softcap": {"seed": 7, "softcap": 0.8},
    "no rotation": {"seed": 8, "rotation": "none"},
    "interleaved, all at once": {
        "seed": 9,
        "rotation": "interleaved",
        "kind": "sliding",
        "window": 13,
        "sinks": True,
        "softcap": 1.3,
    },
}


@pytest.fixture(params=LAYERS, name="layer")
def _layer(request):
    return example_layer(26, dtype=torch.float64, stored=torch.float64, **LAYERS[request.param])


class Loop:
    """The layer as plain Python numbers, and the definitions written out."""

    def __init__(self, layer):
        g = layer.geometry
        self.layer, self.g, self.group = layer, g, g.query_heads // g.kv_heads
        self.q, self.k, self.v = layer.queries.tolist(), layer.keys.tolist(), layer.values.tolist()
        self.sink = None if g.sink_logits is None else g.sink_logits.tolist()

    def sees(self, t, i):
        if i > t:
            return False
        if self.g.kind == "sliding":
            return t - i < self.g.window
        if self.g.kind == "chunked":
            return t // self.g.window == i // self.g.window
        return True

    def candidates(self):
        return [i for i in range(STEP) if self.sees(STEP, i)]

    def logit(self, q, k):
        z = self.g.scale * math.fsum(a * b for a, b in zip(q, k, strict=True))
        return z if self.g.softcap is None else self.g.softcap * math.tanh(z / self.g.softcap)

    def weights(self, h, t, rows):
        """{row: attention of query t of head h over the rows it sees}."""
        z = {i: self.logit(self.q[h][t], self.k[h // self.group][i]) for i in rows if self.sees(t, i)}
        below = math.fsum(math.exp(x) for x in z.values())
        below += math.exp(self.sink[h]) if self.sink else 0.0
        return {i: math.exp(x) / below for i, x in z.items()}

    def heads_of(self, g):
        return range(g * self.group, (g + 1) * self.group)

    def table(self, score):
        """[Hk, N] of score(kv head, row)."""
        rows = self.candidates()
        return torch.tensor([[score(g, i) for i in rows] for g in range(self.g.kv_heads)], dtype=torch.float64)


def reduced(values, how):
    return {"mean": math.fsum(values) / len(values), "max": max(values), "sum": math.fsum(values)}[how]


def agrees(text, layer, expected):
    found = scores_at(policy_from_text(text)[1], layer, STEP)
    assert found.shape == expected.shape
    largest = float(expected[expected.isfinite()].abs().max())
    return float((found - expected).abs().nan_to_num(0.0).max()) <= 1e-12 * max(1.0, largest)


def test_streaming_llm(layer):
    assert agrees("streaming-llm", layer, Loop(layer).table(lambda g, i: float(i)))


def test_knorm(layer):
    loop = Loop(layer)
    assert agrees("knorm", layer, loop.table(lambda g, i: -math.hypot(*loop.k[g][i])))


@pytest.mark.parametrize("anchor", ["normalised", "raw"])
def test_keydiff(layer, anchor):
    loop, rows = Loop(layer), Loop(layer).candidates()

    def score(g, i):
        mean = [0.0] * len(loop.k[g][i])
        for j in rows:
            length = math.hypot(*loop.k[g][j]) if anchor == "normalised" else 1.0
            mean = [m + x / length / len(rows) for m, x in zip(mean, loop.k[g][j], strict=True)]
        dot = math.fsum(a * b for a, b in zip(mean, loop.k[g][i], strict=True))
        return -dot / math.hypot(*mean) / math.hypot(*loop.k[g][i])

    assert agrees(f"keydiff:anchor={anchor}", layer, loop.table(score))


def test_keydiff_ranks_by_the_sum_of_cosines(layer):
    loop, rows = Loop(layer), Loop(layer).candidates()

    def cosine(g, i, j):
        a, b = loop.k[g][i], loop.k[g][j]
        return math.fsum(x * y for x, y in zip(a, b, strict=True)) / math.hypot(*a) / math.hypot(*b)

    pairwise = loop.table(lambda g, i: -math.fsum(cosine(g, i, j) for j in rows))
    assert torch.equal(scores_at(policy_from_text("keydiff")[1], layer, STEP).argsort(1), pairwise.argsort(1))


@pytest.mark.parametrize("reducer", ["mean", "max", "sum"])
@pytest.mark.parametrize("heads", ["layer", "kv-head"])
def test_tova(layer, heads, reducer):
    loop = Loop(layer)

    def score(g, i):
        pooled = range(loop.g.query_heads) if heads == "layer" else loop.heads_of(g)
        return reduced([loop.weights(h, STEP - 1, loop.candidates()).get(i, 0.0) for h in pooled], reducer)

    assert agrees(f"tova:heads={heads},reducer={reducer}", layer, loop.table(score))


@pytest.mark.parametrize("group", ["mean", "max", "sum"])
def test_h2o(layer, group):
    loop = Loop(layer)

    def score(g, i):
        past = range(STEP)
        return reduced([math.fsum(loop.weights(h, t, past).get(i, 0.0) for t in past) for h in loop.heads_of(g)], group)

    assert agrees(f"h2o:group={group}", layer, loop.table(score))


@pytest.mark.parametrize("group", ["mean", "max"])
def test_observed_attention(layer, group):
    loop = Loop(layer)

    def score(g, i):
        past = range(STEP)
        observers = sum(loop.sees(t, i) for t in past)
        received = [math.fsum(loop.weights(h, t, past).get(i, 0.0) for t in past) for h in loop.heads_of(g)]
        return reduced(received, group) / observers

    assert agrees(f"observed-attention:group={group}", layer, loop.table(score))


@pytest.mark.parametrize("order", ["pool-then-reduce", "reduce-then-pool"])
@pytest.mark.parametrize(("pooling", "kernel"), [("avg", 5), ("max", 3), ("avg", 1)])
@pytest.mark.parametrize("group", ["mean", "max"])
def test_snapkv(layer, pooling, kernel, order, group):
    window = 4
    loop, rows = Loop(layer), Loop(layer).candidates()
    before = [i for i in rows if i < STEP - window]

    def votes(h):
        seen = [loop.weights(h, t, rows) for t in range(STEP - window, STEP)]
        return [math.fsum(a.get(i, 0.0) for a in seen) / window for i in before]

    def pool(line):
        half = kernel // 2
        near = [line[max(0, n - half) : n + half + 1] for n in range(len(line))]
        return [max(x) if pooling == "max" else math.fsum(x) / kernel for x in near]  # missing neighbours count as 0

    def scores(g):
        lines = [votes(h) for h in loop.heads_of(g)]
        if order == "pool-then-reduce":
            return [reduced(x, group) for x in zip(*(pool(line) for line in lines), strict=True)]
        return pool([reduced(x, group) for x in zip(*lines, strict=True)])

    expected = loop.table(lambda g, i: scores(g)[before.index(i)] if i in before else 0.0)
    assert agrees(
        f"snapkv:window={window},pooling={pooling},kernel={kernel},order={order},group={group}", layer, expected
    )


def turned(x, cos, sin, layout, rotary):
    """x turned by the angles of one position (or by their mean), channel by channel."""
    out = list(x)
    for n in range(rotary // 2):
        i, j = (n, n + rotary // 2) if layout == "half" else (2 * n, 2 * n + 1)
        out[i] = x[i] * cos[n] - x[j] * sin[n]
        out[j] = x[j] * cos[n] + x[i] * sin[n]
    return out


def expected_queries(layer, h, exclude, horizon, skip=0):
    """Mean and covariance of the un-rotated past queries after the mean future rotation: lists."""
    rotation = layer.geometry.rotation
    rows = range(exclude, STEP)
    if rotation == "none":
        unrotated = [layer.queries[h, t].tolist() for t in rows]
    else:
        unrotated = []
        for t in rows:
            cos, sin = (x[0].tolist() for x in rotation.tables(layer.positions[t : t + 1]))
            square = [c * c + s * s for c, s in zip(cos, sin, strict=True)]
            back = [c / n for c, n in zip(cos, square, strict=True)], [-s / n for s, n in zip(sin, square, strict=True)]
            unrotated.append(turned(layer.queries[h, t].tolist(), *back, rotation.layout, rotation.rotary_dims))
        ahead = [int(layer.positions[STEP - 1]) + 1 + skip + n for n in range(horizon)]
        cos, sin = (x.double().mean(0).tolist() for x in rotation.tables(torch.tensor(ahead)))
        unrotated = [turned(q, cos, sin, rotation.layout, rotation.rotary_dims) for q in unrotated]
    dims = range(len(unrotated[0]))
    mean = [math.fsum(q[d] for q in unrotated) / len(unrotated) for d in dims]
    cov = [
        [math.fsum((q[a] - mean[a]) * (q[b] - mean[b]) for q in unrotated) / len(unrotated) for b in dims] for a in dims
    ]
    return mean, cov


def quadratic(k, cov):
    return math.fsum(k[a] * cov[a][b] * k[b] for a in range(len(k)) for b in range(len(k)))


def slope(loop, z):
    return 1.0 if loop.g.softcap is None else 1 - (z / loop.g.softcap) ** 2


@pytest.mark.parametrize("covariance", ["true", "false"])
@pytest.mark.parametrize("value", ["norm", "projected", "none"])
@pytest.mark.parametrize("group", ["mean", "max"])
def test_expected_attention(layer, covariance, value, group):
    loop, sinks, horizon, epsilon = Loop(layer), 2, 11, 0.02
    scored = [i for i in loop.candidates() if i >= sinks]
    per_head = []
    for h in range(loop.g.query_heads):
        keys = loop.k[h // loop.group]
        mean, cov = expected_queries(layer, h, sinks, horizon)
        z = {i: loop.logit(mean, keys[i]) for i in scored}
        if covariance == "true":
            z = {i: x + 0.5 * (loop.g.scale * slope(loop, x)) ** 2 * quadratic(keys[i], cov) for i, x in z.items()}
        below = math.fsum(math.exp(x) for x in z.values()) + (math.exp(loop.sink[h]) if loop.sink else 0.0)
        per_head.append({i: math.exp(x) / below for i, x in z.items()})

    def factor(h, i):
        v = loop.v[h // loop.group][i]
        if value == "projected":
            v = (torch.tensor(v, dtype=torch.float64) @ layer.output_projection[h]).tolist()
        return math.hypot(*v)

    def score(g, i):
        if i < sinks:
            return 0.0
        heads = loop.heads_of(g)
        if value == "none":
            return reduced([per_head[h][i] for h in heads], group)
        return reduced([(per_head[h][i] + epsilon) * factor(h, i) for h in heads], group)

    text = f"sinks={sinks},horizon={horizon},epsilon={epsilon},covariance={covariance},value={value},group={group}"
    assert agrees(f"expected-attention:{text}", layer, loop.table(score))


def test_exact_expected_attention_averages_the_closed_form(layer):
    """Each future position on its own, exponentials averaged before the softmax."""
    loop, sinks, horizon = Loop(layer), 2, 5
    scored = [i for i in loop.candidates() if i >= sinks]
    per_head = []
    for h in range(loop.g.query_heads):
        statistics = [expected_queries(layer, h, sinks, 1, skip) for skip in range(horizon)]
        moment = {}
        for i in scored:
            k = loop.k[h // loop.group][i]
            terms = []
            for mean, cov in statistics:
                z = loop.logit(mean, k)
                terms.append(math.exp(z + 0.5 * (loop.g.scale * slope(loop, z)) ** 2 * quadratic(k, cov)))
            moment[i] = math.fsum(terms) / horizon
        below = math.fsum(moment.values()) + (math.exp(loop.sink[h]) if loop.sink else 0.0)
        per_head.append({i: x / below for i, x in moment.items()})
    expected = loop.table(
        lambda g, i: (
            0.0
            if i < sinks
            else reduced([per_head[h][i] for h in loop.heads_of(g)], "mean") * math.hypot(*loop.v[g][i])
        )
    )
    assert agrees(f"expected-attention:exact=true,sinks={sinks},horizon={horizon}", layer, expected)


def dumb_capacity(loop, layer, h, rows, options):
    """{row: (score, weight)} of one query head, the section's formulas term by term."""
    scale, tau = loop.g.scale, options["tau"]
    mean, cov = expected_queries(layer, h, options["exclude_statistics"], options["horizon"])
    keys, values = loop.k[h // loop.group], loop.v[h // loop.group]
    z = {i: loop.logit(mean, keys[i]) for i in rows}
    if options["relevance"] == "softmax":
        below = math.fsum(math.exp(x / tau) for x in z.values()) + (math.exp(loop.sink[h] / tau) if loop.sink else 0)
        r = {i: math.exp(x / tau) / below for i, x in z.items()}
    elif options["relevance"] == "ones":
        r = dict.fromkeys(rows, 1.0)
    else:
        x = {i: tau * z[i] for i in rows}
        if options["relevance"] == "exp_cosine":
            for i in rows:
                dot = math.fsum(a * b for a, b in zip(mean, keys[i], strict=True))
                x[i] = tau * max(-1.0, min(1.0, dot / math.hypot(*mean) / math.hypot(*keys[i])))
        top = max(x.values()) if options["shift"] == "max" else 0.0
        r = {i: math.exp(e - top) for i, e in x.items()}
    w = {}
    for i in rows:
        w[i] = (r[i] * (1 - r[i])) ** 2 if options["sensitivity"] == "saturating" else r[i]
        soft = [slope(loop, z[i]) * x for x in keys[i]]
        if options["response"] == "diagonal":
            w[i] *= scale**2 * math.fsum(x * x * cov[d][d] for d, x in enumerate(soft))
        elif options["response"] == "full":
            w[i] *= scale**2 * quadratic(soft, cov)
    ridge = {"identity": 1.0, "relative": math.fsum(w.values()) / len(w)}.get(options["ridge"], options["ridge"])
    u = {i: torch.tensor(values[i], dtype=torch.float64) for i in rows}
    a = ridge * torch.eye(len(values[0]), dtype=torch.float64)
    for i in rows if options["leverage"] else []:
        a += (w[i] + options["weight_eps"]) * torch.outer(u[i], u[i])
    inverse = torch.linalg.inv(a)
    return {i: float(w[i] * (u[i] @ inverse @ u[i])) for i in rows}


JACAP = {
    "relevance": "softmax",
    "tau": 10.0,
    "shift": "max",
    "sensitivity": "saturating",
    "response": "diagonal",
    "leverage": True,
    "ridge": "identity",
    "weight_eps": 0.0,
    "exclude_first": 0,
    "exclude_statistics": 4,
    "horizon": 512,
    "group": "mean",
}
CAPKV = JACAP | {
    "relevance": "exp_cosine",
    "tau": 5.0,
    "sensitivity": "none",
    "response": "none",
    "weight_eps": 1e-6,
    "exclude_first": 4,
}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("jacap", {}),
        ("jacap", {"tau": 1.0, "ridge": "relative"}),
        ("jacap", {"response": "full", "ridge": 0.25, "horizon": 7, "exclude_statistics": 0}),
        ("jacap", {"response": "none", "leverage": False, "weight_eps": 0.1, "group": "max"}),
        ("jacap", {"sensitivity": "none", "exclude_first": 9}),
        ("capkv", {}),
        ("capkv", {"relevance": "exp_dot", "shift": "none", "exclude_first": 0, "exclude_statistics": 0, "tau": 1.5}),
        ("capkv", {"relevance": "ones", "ridge": "relative", "group": "max", "weight_eps": 0.5}),
    ],
)
def test_capacity_policies(layer, name, change):
    loop, options = Loop(layer), (JACAP if name == "jacap" else CAPKV) | change
    rows = [i for i in loop.candidates() if i >= options["exclude_first"]]
    per_head = [dumb_capacity(loop, layer, h, rows, options) for h in range(loop.g.query_heads)]
    expected = loop.table(
        lambda g, i: reduced([per_head[h][i] for h in loop.heads_of(g)], options["group"]) if i in rows else 0.0
    )
    text = ",".join(f"{k}={v}" for k, v in change.items())
    found = scores_at(policy_from_text(f"{name}:{text}")[1], layer, STEP)
    assert float((found - expected).abs().max()) <= 1e-12 * float(expected.abs().max())
    assert bool((found >= 0).all())


def test_jacap_scores_stay_accurate_where_they_are_tiny(layer):
    """At the defaults the weights are about 1e-4; relative errors of single scores count too."""
    loop = Loop(layer)
    per_head = [dumb_capacity(loop, layer, h, loop.candidates(), JACAP) for h in range(loop.g.query_heads)]
    expected = loop.table(lambda g, i: reduced([per_head[h][i] for h in loop.heads_of(g)], "mean"))
    assert float((scores_at(policy_from_text("jacap")[1], layer, STEP) / expected - 1).abs().max()) < 1e-10


def test_oracle_mass(layer):
    loop, everything = Loop(layer), range(layer.tokens)
    future = range(STEP, layer.tokens)

    def score(g, i):
        return math.fsum(loop.weights(h, t, everything).get(i, 0.0) for h in loop.heads_of(g) for t in future)

    assert agrees("oracle-mass", layer, loop.table(score))


def test_oracle_caote_is_the_damage_of_leaving_one_token_out(layer):
    loop, everything = Loop(layer), range(layer.tokens)

    def output(h, t, rows):
        a = loop.weights(h, t, rows)
        values = loop.v[h // loop.group]
        return [math.fsum(a[i] * values[i][d] for i in a) for d in range(loop.g.value_dim)]

    def score(g, i):
        damage = []
        for h in loop.heads_of(g):
            for t in range(STEP, layer.tokens):
                without = output(h, t, [j for j in everything if j != i])
                damage.append(math.dist(output(h, t, everything), without) ** 2)
        return math.fsum(damage)

    assert agrees("oracle-caote", layer, loop.table(score))
