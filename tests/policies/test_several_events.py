"""Policies on a cache that two events have already cut: each against a plain loop over steps and tokens, to 1e-12."""

import math

import pytest
import torch

from kvtool.policies import policy_from_text
from kvtool.testing import example_layer
from kvtool.view import View

TOKENS, FIRST, SECOND, STEP = 48, 24, 32, 40
LAYERS = {
    "grouped": {"seed": 1},
    "no groups": {"seed": 2, "query_heads": 3, "kv_heads": 3},
    "one KV head": {"seed": 3, "kv_heads": 1},
    "sliding": {"seed": 4, "kind": "sliding", "window": 13},
    "chunked": {"seed": 5, "kind": "chunked", "window": 14},
    "sinks": {"seed": 6, "sinks": True},
    "softcap": {"seed": 7, "softcap": 0.8},
    "interleaved, all at once": {
        "seed": 9,
        "rotation": "interleaved",
        "kind": "sliding",
        "window": 25,
        "sinks": True,
        "softcap": 1.3,
    },
}
SPLITS = {"at the events": (FIRST, SECOND), "everywhere": range(1, STEP), "oddly": (5, FIRST, 29, SECOND, 33)}


@pytest.fixture(params=LAYERS, name="layer")
def _layer(request):
    return example_layer(TOKENS, dtype=torch.float64, stored=torch.float64, **LAYERS[request.param])


def leaving(layer):
    """[Hk, T] evict steps: in every run of four rows other tokens for every head, some at each event."""
    found = torch.full((layer.geometry.kv_heads, TOKENS), TOKENS)
    for head, row in enumerate(found):
        for run in range(1, 4):
            row[4 * run + (1 + head) % 4] = FIRST
        for run in (0, 1, 2, 4, 5, 6, 7):
            row[4 * run + (3 + head) % 4] = SECOND
    return found


def observed(policy, layer, leaves, stops):
    """The state after the steps before STEP, shown run by run as a serving loop does; what left is poisoned."""
    state, start = policy.start(layer.geometry), 0
    for stop in [s for s in stops if s < STEP] + [STEP]:
        rows = torch.arange(int(layer.geometry.first_visible(torch.tensor(start))), stop)
        rows = rows[(leaves[:, rows] > start).any(0)]  # a row that one head still holds is listed for all
        tokens = rows.expand(layer.geometry.kv_heads, -1)
        state = policy.observe(state, View(poisoned(layer, leaves, start), stop, tokens, start, leaves[:, rows]))
        start = stop
    return state


def poisoned(layer, leaves, start):
    """The layer whose slots of tokens that left before `start` hold NaN."""
    gone = (leaves <= start)[:, :, None]
    copy = example_layer(TOKENS, dtype=torch.float64)
    object.__setattr__(copy, "geometry", layer.geometry)
    for name in ("keys", "values"):
        vars(copy)[name] = getattr(layer, name).masked_fill(gone, torch.nan)
    vars(copy)["queries"], vars(copy)["positions"] = layer.queries, layer.positions
    return copy


def alive(layer, leaves, step):
    """[Hk, N] rows that the query of `step` could see."""
    oldest = int(layer.geometry.first_visible(torch.tensor(step)))
    return torch.stack([torch.arange(oldest, step)[line[oldest:step] > step] for line in leaves])


def scores(text, layer, splits=(FIRST, SECOND)):
    _, policy = policy_from_text(text)
    leaves = leaving(layer)
    tokens = alive(layer, leaves, STEP)
    view = View(poisoned(layer, leaves, STEP), STEP, tokens, STEP, torch.full_like(tokens, TOKENS))
    return policy.score(observed(policy, layer, leaves, splits), view), tokens


class Loop:
    """The layer as plain Python numbers, and what was live when."""

    def __init__(self, layer):
        g = layer.geometry
        self.g, self.group, self.leaves = g, g.query_heads // g.kv_heads, leaving(layer).tolist()
        self.q, self.k, self.v = layer.queries.tolist(), layer.keys.tolist(), layer.values.tolist()
        self.sink = None if g.sink_logits is None else g.sink_logits.tolist()

    def sees(self, t, i):
        if self.g.kind == "sliding":
            return 0 <= t - i < self.g.window
        return i <= t and (self.g.kind == "full" or t // self.g.window == i // self.g.window)

    def live(self, g, t):
        return [i for i in range(TOKENS) if self.sees(t, i) and t < self.leaves[g][i]]

    def logit(self, h, t, i):
        z = self.g.scale * math.fsum(a * b for a, b in zip(self.q[h][t], self.k[h // self.group][i], strict=True))
        return z if self.g.softcap is None else self.g.softcap * math.tanh(z / self.g.softcap)

    def weights(self, h, t):
        """{row: attention of query t of head h over what was live then}."""
        z = {i: self.logit(h, t, i) for i in self.live(h // self.group, t)}
        below = math.fsum(math.exp(x) for x in z.values()) + (math.exp(self.sink[h]) if self.sink else 0.0)
        return {i: math.exp(x) / below for i, x in z.items()}

    def heads_of(self, g):
        return range(g * self.group, (g + 1) * self.group)


def close(found, tokens, expected):
    """`expected(kv head, row)` at every candidate."""
    by_hand = torch.tensor(
        [[expected(g, i) for i in line] for g, line in enumerate(tokens.tolist())], dtype=torch.float64
    )
    assert by_hand.shape == found.shape
    return float((found - by_hand).abs().max()) <= 1e-12 * max(1.0, float(by_hand.abs().max()))


@pytest.mark.parametrize("splits", SPLITS)
def test_h2o_sums_attention_over_what_was_live_at_each_step(layer, splits):
    loop = Loop(layer)
    table = {h: [loop.weights(h, t) for t in range(STEP)] for h in range(loop.g.query_heads)}

    def received(g, i):
        return math.fsum(a.get(i, 0.0) for h in loop.heads_of(g) for a in table[h]) / loop.group

    found, tokens = scores("h2o", layer, SPLITS[splits])
    assert close(found, tokens, received)


def test_h2o_without_renormalising_is_something_else(layer):
    """Attention over the whole cache, as if nothing had left."""
    loop = Loop(layer)
    found, tokens = scores("h2o", layer)
    loop.leaves = [[TOKENS] * TOKENS for _ in loop.leaves]
    table = {h: [loop.weights(h, t) for t in range(STEP)] for h in range(loop.g.query_heads)}
    whole = lambda g, i: math.fsum(a.get(i, 0.0) for h in loop.heads_of(g) for a in table[h]) / loop.group  # noqa: E731
    assert not close(found, tokens, whole)


@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize("history", [3, 11, 400])
def test_scissorhands_counts_what_got_less_than_an_even_share(layer, history, splits):
    loop = Loop(layer)
    steps = range(max(0, STEP - history), STEP)
    table = {h: {t: loop.weights(h, t) for t in steps} for h in range(loop.g.query_heads)}

    def passed(g, i):
        counts = [
            sum(i in a and a[i] < 1 / len(loop.live(g, t)) for t, a in table[h].items()) for h in loop.heads_of(g)
        ]
        return -sum(counts) / loop.group

    found, tokens = scores(f"scissorhands:history={history}", layer, SPLITS[splits])
    assert close(found, tokens, passed)
    assert float(found.min()) < 0


def spread_by_hand(token, reference):
    scaled = []
    for c, x in enumerate(token):
        column = [other[c] for other in reference]
        if max(column) > min(column):
            scaled.append((x - min(column)) / (max(column) - min(column)))
    if len(scaled) < 2:
        return 0.0
    mean = math.fsum(scaled) / len(scaled)
    return math.sqrt(math.fsum((x - mean) ** 2 for x in scaled) / (len(scaled) - 1))


def lag_by_hand(loop, sinks, lag, ranking):
    """{(kv head, row): judgement}, every partition by the one after it, at the step that completes that one."""
    found = {}
    for g in range(loop.g.kv_heads):
        for p in range(TOKENS):
            low, middle, high = (sinks + (p + n) * lag for n in range(3))
            if high > STEP:
                break
            live = loop.live(g, high - 1)
            mine, other = [i for i in live if low <= i < middle], [i for i in live if middle <= i < high]
            total = dict.fromkeys(mine, 0.0)
            for array in (loop.k[g], loop.v[g]):
                sigma = {i: spread_by_hand(array[i], [array[j] for j in other]) for i in mine}
                below = math.fsum(math.exp(s) for s in sigma.values())
                total = {i: total[i] + math.exp(sigma[i]) / below / 2 for i in mine}
            ranks = {i: n / len(mine) for n, i in enumerate(sorted(mine, key=lambda i, t=total: (t[i], i)))}
            found |= {(g, i): (ranks if ranking else total)[i] for i in mine}
    return found


@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize(("sinks", "lag", "ranking"), [(4, 4, True), (0, 5, False), (2, 7, True), (2, 1, False)])
def test_lagkv_judges_every_partition_once_by_the_next(layer, sinks, lag, ranking, splits):
    loop = Loop(layer)
    judged = lag_by_hand(loop, sinks, lag, ranking)
    found, tokens = scores(f"lagkv:sinks={sinks},lag={lag},ranking={ranking}", layer, SPLITS[splits])
    assert close(found, tokens, lambda g, i: judged.get((g, i), 2.0 + i))
    assert any((g, i) in judged for g, line in enumerate(tokens.tolist()) for i in line)
    assert any((g, i) not in judged for g, line in enumerate(tokens.tolist()) for i in line)


@pytest.mark.parametrize(
    ("window", "kernel", "balance", "threshold", "group"),
    [(8, 7, 0.1, 0.5, "max"), (3, 1, 0.9, 0.2, "max"), (5, 3, 0.5, -0.5, "mean"), (60, 3, 0.5, 2.0, "max")],
)
def test_r_kv_weighs_attention_against_redundancy(layer, window, kernel, balance, threshold, group):
    loop = Loop(layer)
    text = f"r-kv:window={window},kernel={kernel},balance={balance},threshold={threshold},group={group}"
    found, tokens = scores(text, layer)
    combine = max if group == "max" else (lambda x: math.fsum(x) / len(x))

    def of_head(g):
        rows = tokens[g].tolist()
        past = [i for i in rows if i < STEP - window]
        attention = dict.fromkeys(past, 0.0)
        for t in range(max(0, STEP - window), STEP):
            z = {i: combine([loop.logit(h, t, i) for h in loop.heads_of(g)]) for i in past if loop.sees(t, i)}
            below = math.fsum(math.exp(x) for x in z.values())
            below += math.exp(combine([loop.sink[h] for h in loop.heads_of(g)])) if loop.sink else 0.0
            for i, x in z.items():
                attention[i] += math.exp(x) / below / len(range(max(0, STEP - window), STEP))
        line = [attention[i] for i in past]
        pooled = [max(line[max(0, n - kernel // 2) : n + kernel // 2 + 1]) for n in range(len(line))]
        cosines = [[0.0] * len(rows) for _ in rows]
        for a, i in enumerate(rows):
            for b, j in enumerate(rows):
                dot = math.fsum(x * y for x, y in zip(loop.k[g][i], loop.k[g][j], strict=True))
                cosines[a][b] = 0.0 if a == b else dot / math.hypot(*loop.k[g][i]) / math.hypot(*loop.k[g][j])
            near = [b for b in range(len(rows)) if b != a and cosines[a][b] > threshold]
            if near:
                cosines[a][near[-1]] = 0.0
        means = [math.fsum(cosines[a][b] for a in range(len(rows))) / len(rows) for b in range(len(rows))]
        below = math.fsum(math.exp(m) for m in means)
        parts = [(pooled[n] if n < len(past) else 0.0, math.exp(means[n]) / below) for n in range(len(rows))]
        return {i: balance * x - (1 - balance) * y for i, (x, y) in zip(rows, parts, strict=True)}

    by_hand = [of_head(g) for g in range(loop.g.kv_heads)]
    assert close(found, tokens, lambda g, i: by_hand[g][i])
