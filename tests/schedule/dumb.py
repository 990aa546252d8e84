"""The event loop written out step by step in plain Python: sets, lists and loops, nothing remembered that could be
computed again. It shares no line with the loop that it is held against."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from kvtool.layer import Layer

Scores = Callable[[Any, int, int, list[int]], list[float]]  # (cache, event, KV head, rows) -> one score a row


def due(schedule: str, step: int, prompt: int, live: int) -> bool:
    """Whether an event is due at query `step`, which would see `live` tokens without its own."""
    for word in schedule.split("/")[0].split("+"):
        name, number, start = re.fullmatch(r"([a-z-]+)(?::(\d+))?(?:,from:(\d+))?", word).groups()
        n, begin = int(number or 0), prompt if start is None else int(start)
        if name == "prompt-end" and step == prompt:
            return True
        if name == "at" and step == n:
            return True
        if name == "every" and step in range(begin, step + 1, n):
            return True
        if name == "high-water" and step >= begin and live >= n:
            return True
        if name == "prefill" and (step in range(n, prompt, n) or step == prompt):
            return True
    return False


class Cache:
    """One layer as numbers, what left it so far, and attention written out.

    Attributes:
        left: per KV head {row: step of the event that evicted it}.
        events: the steps at which events ran.
    """

    def __init__(self, layer: Layer) -> None:
        g = layer.geometry
        self.layer, self.g, self.group, self.tokens = layer, g, g.query_heads // g.kv_heads, layer.tokens
        self.heads, self.kv_heads = range(g.query_heads), range(g.kv_heads)
        self.k, self.v = layer.keys.tolist(), layer.values.tolist()
        queries = dict(zip(layer.query_steps.tolist(), layer.queries.transpose(0, 1).tolist(), strict=True))
        self.sink = None if g.sink_logits is None else g.sink_logits.tolist()
        self.left: list[dict[int, int]] = [{} for _ in self.kv_heads]
        self.events: list[int] = []
        self.last_query = max(queries)
        self.q = queries
        self._z: dict[tuple[int, int, int], float] = {}

    def sees(self, t: int, i: int) -> bool:
        """Visible to query t: causal, and inside the layer's window or chunk."""
        if i > t:
            return False
        if self.g.kind == "sliding":
            return t - i < self.g.window
        return self.g.kind == "full" or t // self.g.window == i // self.g.window

    def retained(self, g: int, t: int, i: int) -> bool:
        return i not in self.left[g] or t < self.left[g][i]

    def logit(self, q: list[float], k: list[float]) -> float:
        z = self.g.scale * math.fsum(a * b for a, b in zip(q, k, strict=True))
        return z if self.g.softcap is None else self.g.softcap * math.tanh(z / self.g.softcap)

    def z(self, h: int, t: int, i: int) -> float:
        if (h, t, i) not in self._z:
            self._z[h, t, i] = self.logit(self.q[t][h], self.k[h // self.group][i])
        return self._z[h, t, i]

    def weights(self, h: int, t: int, rows: Any) -> dict[int, float]:
        """{row: weight} of query t of head h over `rows`; the sink logit takes its share."""
        z = {i: self.z(h, t, i) for i in rows}
        top = max([*z.values(), *([] if self.sink is None else [self.sink[h]])], default=0.0)
        below = math.fsum(math.exp(x - top) for x in z.values())
        below += 0.0 if self.sink is None else math.exp(self.sink[h] - top)
        return {i: math.exp(x - top) / below for i, x in z.items()}

    def output(self, h: int, t: int, rows: Any) -> list[float]:
        a, values = self.weights(h, t, rows), self.v[h // self.group]
        return [math.fsum(a[i] * values[i][d] for i in a) for d in range(self.g.value_dim)]

    def heads_of(self, g: int) -> range:
        return range(g * self.group, (g + 1) * self.group)

    def candidates(self, g: int, e: int) -> list[int]:
        return [i for i in range(e) if self.sees(e, i) and i not in self.left[g]]

    def evict_step(self) -> list[list[int]]:
        return [[self.left[g].get(i, self.tokens) for i in range(self.tokens)] for g in self.kv_heads]

    def live(self, g: int, t: int) -> int:
        """Tokens that query t sees, its own included."""
        return sum(self.sees(t, i) and self.retained(g, t, i) for i in range(t + 1))


def simulate(
    layer: Layer,
    schedule: str,
    budget: int | Fraction,
    scores: Scores,
    *,
    sinks: int = 0,
    window: int = 0,
    own: Callable[[int], tuple[int, int]] = lambda budget: (0, 0),
    too_slow: bool = False,
) -> Cache:
    """Move a cache through every step of the sequence.

    Args:
        budget: tokens per KV head, or the share that is evicted.
        own: the policy's own (sinks, window) at a budget in tokens.
        too_slow: every event misses its deadline, so the newest tokens stay.
    """
    cache, words = Cache(layer), schedule.split("/")
    after = "after" in words
    delay = sum(int(word[6:]) for word in words if word.startswith("delay:"))
    block = max([int(word[6:]) for word in words if word.startswith("block:")], default=1)
    for t in range(layer.tokens):
        before = [[i for i in range(t) if cache.sees(t, i) and i not in cache.left[g]] for g in cache.kv_heads]
        if not due(schedule, t, layer.prompt_length, max(map(len, before))):
            continue
        e = t + 1 if after else t
        if not 0 < e <= cache.last_query:
            continue
        cache.events.append(e)
        seen = sum(cache.sees(e, i) for i in range(e))
        limit = seen - math.floor(budget * seen) if isinstance(budget, Fraction) else min(budget, seen)
        rows = [cache.candidates(g, e) for g in cache.kv_heads]
        if all(len(mine) <= limit for mine in rows):
            continue
        first, newest = own(limit)
        first, newest = max(first, sinks), max(newest, window + delay)
        judged = [[float(i) for i in rows[g]] if too_slow else scores(cache, e, g, rows[g]) for g in cache.kv_heads]
        if block > 1:
            stay = [pages(rows[0], judged, limit, block, first, newest, e)] * len(rows)
        else:
            stay = [best(rows[g], judged[g], limit, first, newest, e) for g in cache.kv_heads]
        for g in cache.kv_heads:
            cache.left[g] |= {i: e for i in rows[g] if i not in stay[g]}
    return cache


def best(rows: list[int], judged: list[float], limit: int, sinks: int, window: int, e: int) -> set[int]:
    """Sinks from row 0 on, the window from its newest row back, then by score, the newer where they are equal."""

    def place(pair: tuple[int, float]) -> tuple[float, ...]:
        row, score = pair
        if row < sinks:
            return 0, row
        if row >= e - window:
            return 1, -row
        return 2, -score, -row

    return {row for row, _ in sorted(zip(rows, judged, strict=True), key=place)[:limit]}


def pages(
    rows: list[int], judged: list[list[float]], limit: int, block: int, sinks: int, window: int, e: int
) -> set[int]:
    """Whole pages: those of sinks, those of the window, then by mean score; the page being filled counts among the
    window's. The first page that does not fit ends it, and the page being filled stays whatever happens."""
    members: dict[int, list[int]] = {}
    for row in rows:
        members.setdefault(row // block, []).append(row)
    protected_first = {i // block for i in range(sinks)}
    protected_last = {i // block for i in range(max(0, e - window), e)}
    filling = (e - 1) // block if e % block else None
    protected_last |= set() if filling is None else {filling}

    def place(page: int) -> tuple[float, ...]:
        if page in protected_first:
            return 0, page
        if page in protected_last:
            return 1, -page
        every = [line[rows.index(i)] for line in judged for i in members[page]]
        return 2, -math.fsum(every) / len(every), -page

    stay: set[int] = set()
    for page in sorted(members, key=place):
        if len(stay) + len(members[page]) > limit:
            break
        stay |= set(members[page])
    return stay | set(members.get(filling, []))


def errors(cache: Cache, since: int) -> dict[tuple[int, int], tuple[float, float, float]]:
    """(query head, step) -> |f_V - f_R|, |f_V|, and the mass that evicted tokens have, of every query from `since`."""
    found = {}
    for t in range(since, cache.tokens):
        if t not in cache.q:
            continue
        everyone = [i for i in range(t + 1) if cache.sees(t, i)]
        for h in cache.heads:
            alive = [i for i in everyone if cache.retained(h // cache.group, t, i)]
            whole, rest = cache.output(h, t, everyone), cache.output(h, t, alive)
            a = cache.weights(h, t, everyone)
            mass = math.fsum(a[i] for i in everyone if i not in alive)
            found[h, t] = math.dist(whole, rest), math.hypot(*whole), mass
    return found
