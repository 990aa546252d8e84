"""Positions counted inside the cache, against a loop that renumbers every step by hand, in float64 to 1e-12."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from kvtool.budget import Budget
from kvtool.errors import KvtoolError
from kvtool.layer import Layer
from kvtool.live.run import live
from kvtool.metrics import built_in_metrics, evaluate_cells, evaluate_layer, renumbered_errors
from kvtool.metrics.renumbered import live_rows
from kvtool.policies import Protection, policy_from_text
from kvtool.replay import replay
from kvtool.replay.decide import decide
from kvtool.replay.serving import missing_for
from kvtool.retained import RetainedSet
from kvtool.rotation import Rotation
from kvtool.testing import example_layer, scores_at

SAMPLE = Path(__file__).resolve().parents[2] / "sample_traces" / "tiny-gqa.zarr"
TOKENS, FIRST, SECOND = 40, 20, 29
LAYERS = {
    "grouped": {"seed": 1},
    "no groups": {"seed": 2, "query_heads": 3, "kv_heads": 3},
    "one KV head": {"seed": 3, "kv_heads": 1},
    "interleaved": {"seed": 4, "rotation": "interleaved"},
    "no rotation": {"seed": 5, "rotation": "none"},
    "sliding": {"seed": 6, "kind": "sliding", "window": 13},
    "a window of one": {"seed": 7, "kind": "sliding", "window": 1},
    "chunked": {"seed": 8, "kind": "chunked", "window": 14},
    "sinks": {"seed": 9, "sinks": True},
    "softcap": {"seed": 10, "softcap": 0.8},
    "all at once": {
        "seed": 11,
        "rotation": "interleaved",
        "kind": "sliding",
        "window": 17,
        "sinks": True,
        "softcap": 1.3,
    },
    "scaled, last channels": {"seed": 12},
    "every channel": {"seed": 13},
}


@pytest.fixture(params=LAYERS, name="layer")
def _layer(request):
    layer = example_layer(TOKENS, dtype=torch.float64, stored=torch.float64, **LAYERS[request.param])
    frequencies = 100.0 ** (-torch.arange(4) / 4)
    if request.param == "scaled, last channels":
        return with_rotation(layer, Rotation(4, "half", frequencies[:2], attention_scaling=1.3, rotary_start=4))
    if request.param == "every channel":
        return with_rotation(layer, Rotation(8, "half", frequencies))
    return layer


def with_rotation(layer, rotation):
    return dataclasses.replace(layer, geometry=dataclasses.replace(layer.geometry, rotation=rotation))


def cut_twice(layer):
    """Every head loses other rows, at two events."""
    evict = torch.full((layer.geometry.kv_heads, TOKENS), TOKENS, dtype=torch.int32)
    for head, row in enumerate(evict):
        row[2 + head : FIRST - 3 : 3] = FIRST
        row[3 + head : SECOND - 2 : 5] = SECOND
    return RetainedSet(evict)


def turned(x, angles, layout, start, back):
    """x rotated by (cos, sin) of every pair, or turned back: channel by channel."""
    out, (cos, sin) = list(x), angles
    half = len(cos)
    for n in range(half):
        i, j = (start + n, start + n + half) if layout == "half" else (start + 2 * n, start + 2 * n + 1)
        c, s = cos[n], sin[n]
        if back:
            c, s = c / (c * c + s * s), -s / (c * c + s * s)
        out[i], out[j] = x[i] * c - x[j] * s, x[j] * c + x[i] * s
    return out


def moved(layer, x, position, number):
    rotation = layer.geometry.rotation
    if rotation == "none":
        return x
    there, here = (
        [table[0].double().tolist() for table in rotation.tables(torch.tensor([p]))] for p in (position, number)
    )
    back = turned(x, there, rotation.layout, rotation.rotary_start, back=True)
    return turned(back, here, rotation.layout, rotation.rotary_start, back=False)


def output_by_hand(layer, head, query, keys, rows):
    """Attention of one query over `keys` (row -> numbers) with the values of `rows`."""
    g = layer.geometry
    z = {i: g.scale * math.fsum(a * b for a, b in zip(query, keys[i], strict=True)) for i in rows}
    if g.softcap is not None:
        z = {i: g.softcap * math.tanh(x / g.softcap) for i, x in z.items()}
    below = math.fsum(math.exp(x) for x in z.values())
    below += 0.0 if g.sink_logits is None else math.exp(float(g.sink_logits[head]))
    weights = {i: math.exp(x) / below for i, x in z.items()}
    values = layer.values[head // g.group].tolist()
    return [math.fsum(weights[i] * values[i][c] for i in rows) for c in range(g.value_dim)], weights


def by_hand(layer, evict, t, head):
    """(f_V, f_R, m) of one step and query head, everything that is live renumbered."""
    g, kv = layer.geometry, head // layer.geometry.group
    since = int(g.first_visible(torch.tensor(t)))
    seen, keys = range(since, t + 1), layer.keys[kv].tolist()
    query = layer.queries[head, t].tolist()
    full, weights = output_by_hand(layer, head, query, dict(enumerate(keys)), seen)
    kept = [i for i in seen if t < int(evict[kv, i])]
    if len(kept) == len(seen):
        return full, full, 0.0
    place = [int(p) for p in layer.positions]
    again = {i: moved(layer, keys[i], place[i], number) for number, i in enumerate(kept)}
    output, _ = output_by_hand(layer, head, moved(layer, query, place[t], len(kept) - 1), again, kept)
    return full, output, math.fsum(w for i, w in weights.items() if i not in kept)


@pytest.mark.parametrize("block", [None, 1, 7])
def test_every_step_is_renumbered(layer, block):
    cell, steps = cut_twice(layer), torch.tensor([t for t in range(FIRST, TOKENS) if t != 25])
    seen = 0
    for found in renumbered_errors(layer, cell, steps, block=block):
        assert bool(found.gap.isnan().all())
        for head in range(layer.geometry.query_heads):
            for at, t in enumerate(steps[found.rows].tolist()):
                full, output, mass = by_hand(layer, cell.evict_step, t, head)
                expected = torch.tensor([full, output], dtype=torch.float64)
                got = torch.stack([found.full[head, at], found.retained[head, at]])
                assert float((got - expected).abs().max()) < 1e-12
                assert torch.equal(found.error[head, at], got[0] - got[1])
                assert float(found.mass[head, at]) == pytest.approx(mass, abs=1e-12)
                seen += 1
    assert seen == layer.geometry.query_heads * steps.numel()


def test_nothing_evicted_is_exactly_nothing(layer):
    steps = torch.arange(FIRST, TOKENS)
    for cell in (RetainedSet.keep_all(layer.geometry.kv_heads, TOKENS), cut_twice(layer)):
        late = cell.evict_step.clone()
        late[:, 30:] = TOKENS
        for found in renumbered_errors(layer, RetainedSet(late), steps):
            untouched = found.mass == 0
            assert bool((found.error[untouched] == 0).all())
            assert torch.equal(found.retained[untouched], found.full[untouched])
    whole = list(renumbered_errors(layer, RetainedSet.keep_all(layer.geometry.kv_heads, TOKENS), steps))
    assert all(not bool(found.error.any()) and not bool(found.mass.any()) for found in whole)


def twelve(shift):
    """The same twelve tokens wherever the text stands; frequencies whose angles float32 holds exactly."""
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(1, 12, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    rotation, positions = Rotation(8, "half", torch.tensor([1.0, 0.5, 0.25, 0.125])), torch.arange(12) + shift
    q, k = rotation.rotate(2 * q, positions), rotation.rotate(2 * k, positions)
    return Layer.from_arrays(
        q, k, v, prompt_length=11, scale=0.4, positions=positions, rotation=rotation, dtype=torch.float64
    )


def kept_five():
    evict = torch.full((1, 12), 11, dtype=torch.int32)
    evict[0, [0, 1, 5, 6, 11]] = 12
    return RetainedSet(evict)


def test_where_the_text_stands_does_not_matter_and_keys_alone_must_not_move():
    near, far = (next(renumbered_errors(twelve(shift), kept_five(), torch.tensor([11]))) for shift in (0, 500))
    assert float((near.retained - far.retained).abs().max()) < 1e-12
    assert float((near.full - far.full).abs().max()) < 1e-5  # tables of cosines are float32
    layer, kept = twelve(0), [0, 1, 5, 6, 11]
    (original,) = evaluate_layer(layer, [kept_five()], torch.tensor([11]))
    keys = {i: moved(layer, layer.keys[0, i].tolist(), i, n) for n, i in enumerate(kept)}
    alone, _ = output_by_hand(layer, 0, layer.queries[0, 11].tolist(), keys, kept)
    true = dict(enumerate(layer.keys[0].tolist()))
    plain, _ = output_by_hand(layer, 0, layer.queries[0, 11].tolist(), true, kept)
    cache = near.retained[0, 0]
    assert float(original.squared_error[0, 0]) == pytest.approx(
        float((near.full[0, 0] - torch.tensor(plain, dtype=torch.float64)).square().sum()), rel=1e-9
    )
    assert float((cache - torch.tensor(plain, dtype=torch.float64)).norm()) > 0.1
    assert float((cache - torch.tensor(alone, dtype=torch.float64)).norm()) > 0.1


def test_an_event_at_every_step_leaves_no_gap_and_no_drift():
    """2 sinks and 4 newest, 12 steps: numbers are 0..n-1 at every step, and float32 stays near float64."""
    layer = example_layer(18, seed=4, dtype=torch.float64)
    evict = torch.full((2, 18), 18, dtype=torch.int32)
    evict[:, 2:] = (torch.arange(2, 18) + 4).clamp_max(18)
    steps = torch.arange(6, 18)
    for t in steps.tolist():
        assert live_rows(layer, evict[0], t).tolist() == [0, 1, *range(t - 3, t + 1)]
    wide, narrow = (
        torch.cat([b.retained for b in renumbered_errors(layer.with_dtype(kind), RetainedSet(evict), steps)], 1)
        for kind in (torch.float64, torch.float32)
    )
    assert float((wide - narrow).abs().max()) < 1e-5
    for at, t in enumerate(steps.tolist()):
        _, output, _ = by_hand(layer, evict, t, 3)
        assert float((wide[3, at] - torch.tensor(output, dtype=torch.float64)).abs().max()) < 1e-12


@pytest.mark.parametrize("recorded", [True, False])
def test_a_rotation_that_is_no_function_of_position_is_refused(recorded):
    cos, sin = (torch.ones(TOKENS, 2) * x for x in (1.0, 0.0))
    layer = with_rotation(example_layer(TOKENS), Rotation(4, cos=cos, sin=sin) if recorded else None)
    with pytest.raises(KvtoolError, match="own rows only" if recorded else "does not say") as refused:
        renumbered_errors(layer, cut_twice(layer), torch.arange(FIRST, TOKENS))
    assert refused.value.code == "trace-lacks"
    _, policy = policy_from_text("streaming-llm:positions=cache")
    assert "rot" in str(missing_for(policy, layer, FIRST))
    assert missing_for(policy_from_text("streaming-llm")[1], layer, FIRST) is None


def test_cells_of_both_kinds_stand_beside_each_other():
    layer = example_layer(TOKENS, dtype=torch.float64, seed=3)
    steps, mass = torch.arange(FIRST, TOKENS), torch.ones(2, TOKENS, dtype=torch.float64)
    cells = [cut_twice(layer), RetainedSet.keep_all(2, TOKENS), cut_twice(layer)]
    plain = evaluate_layer(layer, cells, steps, future_mass=mass)
    same = evaluate_cells(layer, cells, steps, ["original"] * 3, future_mass=mass)
    mixed = evaluate_cells(layer, cells, steps, ["cache", "original", "original"], future_mass=mass)
    for name in ("squared_error", "squared_output", "mass", "gap", "cosine", "layer_squared_error", "gradient_dot"):
        for old, new in zip(plain, same, strict=True):
            assert torch.equal(getattr(old, name).nan_to_num(-1.0), getattr(new, name).nan_to_num(-1.0))
        assert torch.equal(getattr(plain[2], name).nan_to_num(-1.0), getattr(mixed[2], name).nan_to_num(-1.0))
    moved_cell = mixed[0]
    errors = torch.cat([b.error for b in renumbered_errors(layer, cells[0], steps)], 1)
    assert torch.equal(moved_cell.squared_error, errors.square().sum(-1))
    assert not torch.allclose(moved_cell.squared_error, plain[0].squared_error, rtol=0.1)
    assert torch.allclose(moved_cell.mass, plain[0].mass, rtol=0, atol=1e-12)
    assert bool(moved_cell.gap.isnan().all())
    slopes = layer.output_gradients[:, :, steps]
    assert torch.allclose(moved_cell.gradient_dot, -(slopes * errors).sum(-1), rtol=1e-12, atol=1e-15)
    assert moved_cell.gradients == layer.gradients
    assert moved_cell.drawn_steps == plain[0].drawn_steps > 0
    assert moved_cell.future_mass is None
    assert mixed[2].future_mass is mass
    with pytest.raises(KvtoolError, match="freezes a cache"):
        evaluate_cells(layer, cells, steps, ["cache"] * 3, mode="pool")
    with pytest.raises(ValueError, match="positions"):
        evaluate_cells(layer, cells, steps, ["cache"])


def test_streaming_llm_decides_the_same_and_is_measured_otherwise():
    layer = example_layer(TOKENS, dtype=torch.float64, seed=3)
    (_, old), (_, new) = policy_from_text("streaming-llm"), policy_from_text("streaming-llm:positions=cache")
    assert torch.equal(scores_at(old, layer, FIRST), scores_at(new, layer, FIRST))
    assert (old.positions, new.positions) == ("original", "cache")
    assert policy_from_text("h2o")[1].positions == "original"
    steps = torch.arange(FIRST, TOKENS)
    cells = [
        decide(layer, "streaming-llm", p, [Budget.from_tokens(8)], FIRST, Protection(), steps)[0] for p in (old, new)
    ]
    assert cells[0].digest() == cells[1].digest()
    mass = torch.ones(2, TOKENS, dtype=torch.float64)
    errors = evaluate_cells(layer, cells, steps, [p.positions for p in (old, new)], future_mass=mass)
    columns = [
        {name: m.partial(e, layer.geometry, c) for name, m in built_in_metrics().items()}
        for e, c in zip(errors, cells, strict=True)
    ]
    regret = [c["mass_regret"]["mass_regret"] for c in columns]
    assert bool(regret[0].isfinite().all())
    assert bool(regret[1].isnan().all())
    assert bool(columns[1]["direction_gap"]["direction_gap"].isnan().all())
    assert bool(columns[1]["output_error"]["output_error"].isfinite().all())
    with pytest.raises(KvtoolError, match="original, cache"):
        policy_from_text("streaming-llm:positions=true")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"evaluate": "pool"}, "--evaluate pool holds for true positions only"),
        ({"token_shares": True}, "--token-shares holds for true positions only"),
        ({"decompose": True}, "--decompose tells apart"),
    ],
)
def test_what_holds_for_true_positions_only_is_refused(options, words):
    with pytest.raises(KvtoolError, match=words) as refused:
        replay(SAMPLE, ["streaming-llm:positions=cache"], ratios=["0.5"], sinks=1, window=8, **options)
    assert refused.value.code == "usage"


def test_the_closed_loop_refuses():
    with pytest.raises(KvtoolError, match="streaming-llm:positions=cache counts positions inside its cache") as refused:
        live("no-model", SAMPLE, ["streaming-llm:positions=cache"], ratios=["0.5"])
    assert refused.value.code == "usage"
