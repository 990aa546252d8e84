"""A second event on a cache with gaps: queries and futures stand at their true positions, not at places in the cache.

Each policy is held against a plain computation with true positions, and that one against the versions that
are met in the field: queries rotated at the current position, futures that start behind the buffer.
"""

import pytest
import torch

from kvtool.policies import policy_from_text
from kvtool.selection import select
from kvtool.testing import example_layer
from kvtool.view import View

TOKENS, FIRST, STEP = 48, 24, 40
GONE = [1, 2, 5, 7, 8, 11, 13, 14, 17, 19, 20]  # at the first event, in every head


def cache():
    """(layer, policy-independent view of the second event, its rows)."""
    layer = example_layer(TOKENS, seed=5, dtype=torch.float64, stored=torch.float64, mean_query=2.0)
    rows = torch.tensor([i for i in range(STEP) if i not in GONE])
    for name in ("keys", "values"):
        getattr(layer, name)[:, GONE] = torch.nan
    return layer, rows


def scored(text, layer, rows):
    _, policy = policy_from_text(text)
    tokens = rows.expand(2, -1)
    never = torch.full_like(tokens, TOKENS)
    state = policy.observe(policy.start(layer.geometry), View(layer, STEP, tokens, FIRST, never))
    return policy.score(state, View(layer, STEP, tokens, STEP, never))


def attention(layer, head, query, step, rows):
    """[n] weights of one query over the rows it could see."""
    z = 0.4 * layer.keys[head // 2, rows] @ query
    return torch.softmax(z.masked_fill(rows > step, -torch.inf), 0)


def moved(layer, queries, rows, positions):
    """`queries` [n, D] of `rows`, as if they stood at `positions` [n]."""
    rotation = layer.geometry.rotation
    return rotation.rotate(rotation.unrotate(queries, layer.positions[rows]), positions)


def test_tova_reads_the_newest_query_and_shares_one_set():
    layer, rows = cache()
    found = scored("tova", layer, rows)
    lines = [attention(layer, h, layer.queries[h, STEP - 1], STEP - 1, rows) for h in range(4)]
    assert torch.allclose(found, torch.stack(lines).mean(0).expand(2, -1), rtol=1e-12, atol=1e-15)
    older = [attention(layer, h, layer.queries[h, STEP - 2], STEP - 2, rows) for h in range(4)]
    assert not torch.allclose(found[0], torch.stack(older).mean(0), rtol=1e-2)
    tokens = rows.expand(2, -1)
    chosen = select(found, tokens, [9, 9], sinks=0, window=1, step=STEP)
    assert torch.equal(chosen.keep[0], chosen.keep[1])
    for budget in (len(rows), len(rows) + 5):  # nothing to do
        assert bool(select(found, tokens, [budget] * 2, sinks=0, window=1, step=STEP).keep.all())


@pytest.mark.parametrize("window", [12, 20])
def test_snapkv_lets_queries_of_before_the_last_event_vote_where_they_stood(window):
    """20 queries vote though only 16 are new: the others lie before the first event."""
    layer, rows = cache()
    found = scored(f"snapkv:window={window},kernel=3", layer, rows)
    steps = torch.arange(STEP - window, STEP)
    before = rows < STEP - window

    def votes(queries_of):
        lines = []
        for h in range(4):
            queries = queries_of(layer.queries[h, steps])
            line = sum(attention(layer, h, q, int(t), rows) for q, t in zip(queries, steps, strict=True)) / window
            line = torch.cat([torch.zeros(1), line[before], torch.zeros(1)])
            lines.append((line[:-2] + line[1:-1] + line[2:]) / 3)
        return torch.stack(lines).view(2, 2, -1).mean(1)

    assert torch.allclose(found[:, before], votes(lambda q: q), rtol=1e-12, atol=1e-15)
    assert not bool(found[:, ~before].any())
    here = layer.positions[torch.full((window,), STEP - 1)]
    assert not torch.allclose(found[:, before], votes(lambda q: moved(layer, q, steps, here)), rtol=1e-2)


def future_of(layer, steps, positions):
    """(mean, covariance) [H, ...] of the queries of `steps`, turned by the rotation averaged over `positions`."""
    rotation = layer.geometry.rotation
    plain = torch.stack([rotation.unrotate(q, layer.positions[steps]) for q in layer.queries[:, steps]])
    basis = torch.eye(8, dtype=torch.float64)
    turn = sum(rotation.rotate(basis, p.expand(8)) for p in positions) / len(positions)  # rows: images of the basis
    mean = plain.mean(1)
    centred = plain - mean[:, None]
    return mean @ turn, turn.T @ (centred.transpose(1, 2) @ centred / len(steps)) @ turn


def expected_attention(layer, rows, mean, covariance):
    kept, lines = rows >= 4, []
    for h in range(4):
        keys = layer.keys[h // 2, rows]
        z = 0.4 * keys @ mean[h] + 0.08 * ((keys @ covariance[h]) * keys).sum(1)
        weights = torch.softmax(z.masked_fill(~kept, -torch.inf), 0)
        lines.append(weights * layer.values[h // 2, rows].norm(dim=1))
    return torch.stack(lines).view(2, 2, -1).mean(1)


def cap_kv(layer, rows, mean, covariance):
    kept, lines = rows >= 4, []
    for h in range(4):
        keys, values = layer.keys[h // 2, rows], layer.values[h // 2, rows]
        cosine = keys @ mean[h] / keys.norm(dim=1) / mean[h].norm()
        weights = torch.exp(5 * (cosine - cosine[kept].max())) * kept
        u = values * kept[:, None]
        gram = torch.eye(6, dtype=torch.float64) + u.T @ ((weights + 1e-6)[:, None] * u)
        lines.append(weights * ((u @ torch.linalg.inv(gram)) * u).sum(1))
    return torch.stack(lines).view(2, 2, -1).mean(1)


@pytest.mark.parametrize(("text", "formula"), [("expected-attention", expected_attention), ("capkv", cap_kv)])
def test_futures_follow_the_newest_token_and_no_query_is_taken_for_a_sink(text, formula):
    layer, rows = cache()
    found = scored(f"{text}:horizon=9", layer, rows)
    past, ahead = torch.arange(4, STEP), layer.positions[STEP - 1] + 1 + torch.arange(9)
    right = formula(layer, rows, *future_of(layer, past, ahead))
    assert torch.allclose(found, right, rtol=1e-10, atol=1e-15)
    buffer = torch.arange(FIRST, STEP)  # the queries since the last event
    wrong = {
        "futures that start behind the buffer": (past, len(buffer) + torch.arange(9)),
        "the buffer alone": (buffer, ahead),
        "its first queries taken for sinks": (buffer[4:], len(buffer) + torch.arange(9)),
        "places in the cache": (past, len(rows) + torch.arange(9)),
    }
    for name, (steps, positions) in wrong.items():
        assert not torch.allclose(found, formula(layer, rows, *future_of(layer, steps, positions)), rtol=1e-2), name
