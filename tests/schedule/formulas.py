"""What policies score, from their definitions, for a cache with gaps. Policies whose formulas are proved elsewhere
token by token are asked themselves, about a view that is built up one step at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from dumb import Cache, Scores
from torch import Tensor

from kvtool.policies import policy_from_text
from kvtool.view import View


def knorm(cache: Cache, e: int, g: int, rows: list[int]) -> list[float]:
    return [-math.hypot(*cache.k[g][i]) for i in rows]


def keydiff(cache: Cache, e: int, g: int, rows: list[int]) -> list[float]:
    unit = {i: [x / math.hypot(*cache.k[g][i]) for x in cache.k[g][i]] for i in rows}
    anchor = [math.fsum(unit[i][d] for i in rows) for d in range(cache.g.key_dim)]
    return [-math.fsum(a * b for a, b in zip(unit[i], anchor, strict=True)) / math.hypot(*anchor) for i in rows]


def newest(cache: Cache, e: int, g: int, rows: list[int]) -> list[float]:
    return [float(i) for i in rows]


def votes(cache: Cache, h: int, e: int, count: int, rows: list[int]) -> dict[int, float]:
    """What the last `count` queries before e pay to `rows`, which share all attention."""
    paid = dict.fromkeys(rows, 0.0)
    for t in range(max(0, e - count), e):
        for i, a in cache.weights(h, t, [i for i in rows if cache.sees(t, i)]).items():
            paid[i] += a
    return paid


def tova(cache: Cache, e: int, g: int, rows: list[int]) -> list[float]:
    paid = [votes(cache, h, e, 1, rows) for h in cache.heads]
    return [math.fsum(line[i] for line in paid) / len(paid) for i in rows]


def snapkv(window: int, kernel: int) -> Scores:
    def score(cache: Cache, e: int, g: int, rows: list[int]) -> list[float]:
        past = [i for i in rows if i < e - window]
        found = dict.fromkeys(rows, 0.0)
        for h in cache.heads_of(g):
            paid = votes(cache, h, e, window, rows)
            for n, i in enumerate(past):
                near = past[max(0, n - kernel // 2) : n + kernel // 2 + 1]
                found[i] += math.fsum(paid[j] for j in near) / kernel / min(window, e) / cache.group
        return [found[i] for i in rows]

    return score


def received(cache: Cache, e: int, h: int) -> dict[int, float]:
    """H2O's accumulators from step 0 on: at every step the softmax over what was live there."""
    total = dict.fromkeys(range(e), 0.0)
    for t in range(e):
        live = [i for i in range(t + 1) if cache.sees(t, i) and cache.retained(h // cache.group, t, i)]
        for i, a in cache.weights(h, t, live).items():
            total[i] += a
    return total


def h2o(cache: Cache, e: int, g: int, rows: list[int]) -> list[float]:
    paid = [received(cache, e, h) for h in cache.heads_of(g)]
    return [math.fsum(line[i] for line in paid) / len(paid) for i in rows]


def observed_attention(cache: Cache, e: int, g: int, rows: list[int]) -> list[float]:
    observers = {i: sum(cache.sees(t, i) for t in range(e)) for i in rows}
    return [x / observers[i] for i, x in zip(rows, h2o(cache, e, g, rows), strict=True)]


def jacap(cache: Cache, e: int, g: int, rows: list[int]) -> list[float]:
    """metrics.md section 4: s^2 [a(1-a)]^2 k~ diag(variance) k~ at temperature 10, and its leverage."""
    layer, s, tau, total = cache.layer, cache.g.scale, 10.0, [0.0] * len(rows)
    rotation, past = cache.g.rotation, torch.arange(max(0, min(4, e - 1)), e)
    for h in cache.heads_of(g):
        q = torch.tensor([cache.q[t][h] for t in past.tolist()], dtype=torch.float64)
        turn = torch.eye(cache.g.key_dim, dtype=torch.float64)
        if rotation != "none":
            q = rotation.unrotate(q[None], layer.positions[past], past)[0]
            turn = rotation.mean_matrix(layer.positions[e - 1] + 1 + torch.arange(512), cache.g.key_dim)
        mean = (turn @ q.mean(0)).tolist()
        spread = (turn @ torch.cov(q.T, correction=0).view(cache.g.key_dim, -1) @ turn.T).diagonal().tolist()
        z = {i: cache.logit(mean, cache.k[g][i]) for i in rows}
        below = math.fsum(math.exp(x / tau) for x in z.values())
        below += 0.0 if cache.sink is None else math.exp(cache.sink[h] / tau)
        a = {i: math.exp(x / tau) / below for i, x in z.items()}
        soft = {i: 1.0 if cache.g.softcap is None else 1 - (x / cache.g.softcap) ** 2 for i, x in z.items()}
        w = {
            i: (s * a[i] * (1 - a[i]) * soft[i]) ** 2
            * math.fsum(k * k * v for k, v in zip(cache.k[g][i], spread, strict=True))
            for i in rows
        }
        u = {i: torch.tensor(cache.v[g][i], dtype=torch.float64) for i in rows}
        gram = torch.eye(cache.g.value_dim, dtype=torch.float64)
        for i in rows:
            gram += w[i] * torch.outer(u[i], u[i])
        inverse = torch.linalg.inv(gram)
        total = [x + float(w[i] * (u[i] @ inverse @ u[i])) / cache.group for x, i in zip(total, rows, strict=True)]
    return total


def future(damage: bool) -> Scores:
    """The oracles: what every later query with a step of its own pays, or loses, with nothing evicted."""

    def score(cache: Cache, e: int, g: int, rows: list[int]) -> list[float]:
        found = dict.fromkeys(rows, 0.0)
        for t in (t for t in cache.q if t >= e):
            everyone = [i for i in range(t + 1) if cache.sees(t, i)]
            for h in cache.heads_of(g):
                a, f = cache.weights(h, t, everyone), cache.output(h, t, everyone)
                for i in set(rows) & set(everyone):
                    lost = (a[i] / (1 - a[i]) * math.dist(cache.v[g][i], f)) ** 2 if damage else a[i]
                    found[i] += lost
        return [found[i] for i in rows]

    return score


def asked(text: str) -> Scores:
    """The policy's own answer, all heads of the view holding the head's tokens, its state built one step at a time."""
    policy = policy_from_text(text)[1]

    def score(cache: Cache, e: int, g: int, rows: list[int]) -> list[float]:
        layer, ahead = cache.layer, cache.layer.query_steps
        state = policy.start(cache.g)
        for t in range(e):
            seen = [i for i in range(t + 1) if cache.sees(t, i) and cache.retained(g, t, i)]
            tokens = _everywhere(cache, seen)
            leaves = torch.tensor([[cache.left[g].get(i, cache.tokens) for i in seen]]).expand(len(tokens), -1)
            state = policy.observe(state, View(layer, t + 1, tokens, t, leaves, ahead if policy.oracle else None))
        tokens = _everywhere(cache, rows)
        later = ahead[ahead >= e] if policy.oracle else None
        view = View(layer, e, tokens, e, torch.full_like(tokens, cache.tokens), later)
        return policy.score(state, view)[g].tolist()

    return score


def _everywhere(cache: Cache, rows: list[int]) -> Tensor:
    return torch.tensor([rows] * len(cache.kv_heads), dtype=torch.int64)


def nothing(budget: int) -> tuple[int, int]:
    return 0, 0


# policy as it is typed -> its scores, and its own (sinks, window) at a budget
POLICIES: dict[str, tuple[Scores, Callable[[int], Any]]] = {
    "streaming-llm:sinks=2": (newest, lambda budget: (2, 0)),
    "knorm": (knorm, nothing),
    "keydiff": (keydiff, nothing),
    "keydiff:recent=0.3": (keydiff, lambda budget: (0, budget * 3 // 10)),
    "tova": (tova, lambda budget: (0, 1)),
    "snapkv:window=3,kernel=3": (snapkv(3, 3), lambda budget: (0, 3)),
    "h2o": (h2o, lambda budget: (0, budget // 2)),
    "observed-attention": (observed_attention, nothing),
    "jacap": (jacap, nothing),
    "oracle-mass": (future(damage=False), nothing),
    "oracle-caote": (future(damage=True), nothing),
    "random": (asked("random"), nothing),
    "expected-attention:sinks=1": (asked("expected-attention:sinks=1"), lambda budget: (1, 0)),
    "capkv": (asked("capkv"), lambda budget: (4, 0)),
    "capkv-paper": (asked("capkv-paper"), nothing),
    "capacity:blend=0.5": (asked("capacity:blend=0.5"), nothing),
    "jacap:statistics=ema": (asked("jacap:statistics=ema"), nothing),
    "r-kv:window=3,kernel=3": (asked("r-kv:window=3,kernel=3"), lambda budget: (0, 3)),
    "lagkv:sinks=1,lag=4": (asked("lagkv:sinks=1,lag=4"), lambda budget: (1, 0)),
    "scissorhands:history=6,recent=2": (asked("scissorhands:history=6,recent=2"), lambda budget: (0, 2)),
}
