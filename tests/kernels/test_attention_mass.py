"""Attention mass against a loop over every query and key."""

import math

import pytest
import torch

from kvtool.kernels.attention_mass import attention_blocks, attention_mass, reference


def dumb_weights(q, k, steps, rows, first, left, scale, softcap, sinks):
    """[H, R, N] float64, one softmax at a time, on the live set alone."""
    heads, kv_heads = q.shape[0], k.shape[0]
    out = torch.zeros(heads, q.shape[1], k.shape[1], dtype=torch.float64)
    for h in range(heads):
        g = h // (heads // kv_heads)
        for r, t in enumerate(steps.tolist()):
            live = [
                i
                for i, row in enumerate(rows[g].tolist())
                if int(first[r]) <= row <= t and (left is None or t < int(left[g, i]))
            ]
            z = {}
            for i in live:
                z[i] = scale * sum(a * b for a, b in zip(q[h, r].tolist(), k[g, i].tolist(), strict=True))
                if softcap is not None:
                    z[i] = softcap * math.tanh(z[i] / softcap)
            top = max([*z.values(), *([] if sinks is None else [float(sinks[h])])], default=0.0)
            below = sum(math.exp(v - top) for v in z.values())
            below += 0.0 if sinks is None else math.exp(float(sinks[h]) - top)
            for i, v in z.items():
                out[h, r, i] = math.exp(v - top) / below
    return out


def case(seed, heads=4, kv_heads=2, tokens=23, dim=5, ragged=False):
    g = torch.Generator().manual_seed(seed)
    rows = torch.arange(tokens).expand(kv_heads, -1)
    if ragged:
        rows = torch.randint(1, 4, (kv_heads, tokens), generator=g).cumsum(1) - 1
    last = int(rows.max()) + 1
    steps = torch.arange(last)
    q = torch.randn(heads, last, dim, generator=g, dtype=torch.float64)
    k = torch.randn(kv_heads, tokens, dim, generator=g, dtype=torch.float64)
    left = torch.randint(1, 2 * last, (kv_heads, tokens), generator=g)
    return q, k, steps, rows, left


@pytest.mark.parametrize("block", [1, 3, 7, None])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 1, 6])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("evicted", [False, True])
@pytest.mark.parametrize("sink", [False, True])
def test_equals_the_loop(block, softcap, window, ragged, evicted, sink):
    q, k, steps, rows, left = case(5, ragged=ragged)
    first = torch.zeros_like(steps) if window is None else (steps - window + 1).clamp_min(0)
    sinks = torch.tensor([0.3, -2.0, 40.0, -900.0], dtype=torch.float64) if sink else None
    left = left if evicted else None
    expected = dumb_weights(q, k, steps, rows, first, left, 0.7, softcap, sinks)
    options = {
        "steps": steps,
        "rows": rows if ragged else rows[0],
        "first_visible": first,
        "evict_step": left,
        "scale": 0.7,
        "softcap": softcap,
        "sink_logits": sinks,
        "block": block,
    }
    mass = attention_mass(q, k, **options)
    assert mass.dtype == torch.float64
    assert float((mass - expected.sum(1)).abs().max()) < 1e-12
    whole = torch.zeros_like(expected)
    for part in attention_blocks(q, k, **options):
        whole[:, part.queries, part.columns] = part.weights
    assert float((whole - expected).abs().max()) < 1e-13


def test_a_future_key_never_gets_mass():
    q, k, steps, rows, _ = case(1)
    k[:, 12] = 50.0
    q[:] = 50.0
    mass = attention_mass(q[:, :12], k, steps=steps[:12], rows=rows, first_visible=steps[:12] * 0, scale=1.0)
    assert float(mass[:, 12:].abs().max()) == 0.0
    assert float((mass.sum(1) - 12).abs().max()) < 1e-12


@pytest.mark.parametrize("poison", [math.nan, 1e30, -math.inf, math.inf])
def test_dead_and_unborn_slots_may_hold_anything(poison):
    q, k, steps, rows, left = case(2)
    left[:, 3] = 0
    left[:, 4:] += 3
    options = {"steps": steps, "rows": rows, "first_visible": steps * 0, "evict_step": left, "scale": 1.0}
    clean = attention_mass(q, k, block=4, **options)
    dirty = k.clone()
    dirty[:, 3] = poison
    assert torch.equal(clean, attention_mass(q, dirty, block=4, **options))


def test_nan_that_is_seen_stays_visible():
    q, k, steps, rows, _ = case(3)
    k[0, 2] = math.nan
    mass = attention_mass(q, k, steps=steps, rows=rows, first_visible=steps * 0, scale=1.0)
    assert bool(mass[:2].isnan().any())
    assert not bool(mass[2:].isnan().any())


def test_empty_cache_and_no_queries():
    q, k, steps, rows, _ = case(4)
    none = attention_mass(q, k[:, :0], steps=steps, rows=rows[:, :0], first_visible=steps * 0, scale=1.0)
    assert none.shape == (4, 0)
    sinks = torch.zeros(4, dtype=torch.float64)
    blind = attention_mass(q, k, steps=steps, rows=rows + 99, first_visible=steps, scale=1.0, sink_logits=sinks)
    assert float(blind.abs().max()) == 0.0
    unasked = attention_mass(q[:, :0], k, steps=steps[:0], rows=rows, first_visible=steps[:0], scale=1.0)
    assert float(unasked.abs().max()) == 0.0


def test_logits_far_below_the_sink_or_far_above_it_neither_vanish_nor_overflow():
    q = torch.full((1, 1, 1), 1.0)
    k = torch.tensor([[[-400.0], [-401.0]]])
    options = {"steps": torch.tensor([1]), "rows": torch.arange(2), "first_visible": torch.tensor([0]), "scale": 1.0}
    alone = attention_mass(q, k, **options)
    assert alone[0].tolist() == pytest.approx([1 / (1 + math.exp(-1)), 1 / (1 + math.exp(1))], rel=1e-6)
    assert float(attention_mass(q, k, sink_logits=torch.tensor([3e4]), **options).sum()) == 0.0
    assert float(attention_mass(q, -k, sink_logits=torch.tensor([0.0]), **options).sum()) == pytest.approx(1.0)


def test_sixteen_bit_inputs_are_summed_in_float64():
    ones = torch.zeros(1, 5000, 4, dtype=torch.bfloat16)
    keys = torch.zeros(1, 100, 4, dtype=torch.bfloat16)
    steps = torch.arange(100, 5100)
    mass = attention_mass(ones, keys, steps=steps, rows=torch.arange(100), first_visible=steps * 0, scale=1.0)
    assert mass[0].tolist() == pytest.approx([50.0] * 100, rel=1e-6)


@pytest.fixture
def poisoned():
    """Memory that is not written first holds NaN."""
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.utils.deterministic.fill_uninitialized_memory = before
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tokens", "dim"), [(6, 3, 63, 5), (8, 2, 37, 80), (5, 5, 20, 3), (7, 1, 31, 4)]
)
@pytest.mark.parametrize("room", [1, 3000, 8 << 20])
@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_however_heads_and_queries_are_cut(
    monkeypatch, poisoned, heads, kv_heads, tokens, dim, room, sink, dtype, bound
):
    monkeypatch.setattr(reference, "MASS_BYTES", room)
    q, k, steps, rows, left = case(tokens, heads, kv_heads, tokens, dim, ragged=True)
    sinks = torch.randn(heads, generator=torch.Generator().manual_seed(0), dtype=torch.float64) if sink else None
    first = (steps - 25).clamp_min(0)
    expected = dumb_weights(q, k, steps, rows, first, left, 0.4, None, sinks).sum(1)
    mass = attention_mass(
        q.to(dtype),
        k.to(dtype),
        steps=steps,
        rows=rows,
        first_visible=first,
        evict_step=left,
        scale=0.4,
        sink_logits=sinks,
    )
    assert float((mass - expected).abs().max()) < bound


def test_blocks_are_memory_of_their_own():
    q, k, steps, rows, _ = case(6)
    blocks = list(attention_blocks(q, k, steps=steps, rows=rows, first_visible=steps * 0, scale=1.0, block=4))
    total = torch.zeros(4, 23, dtype=torch.float64)
    for part in blocks:
        total[:, part.columns] += part.weights.sum(1)
    assert (
        float((total - attention_mass(q, k, steps=steps, rows=rows, first_visible=steps * 0, scale=1.0)).abs().max())
        < 1e-12
    )
