"""The reference of retained attention against a loop over tokens in plain Python floats."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kvtool.kernels.retained_attention.reference import CellBlock, attention, retained_attention

torch.set_num_threads(1)


def make_case(
    heads: int,
    kv_heads: int,
    dim: int,
    value_dim: int,
    tokens: int,
    count: int,
    *,
    cells: int = 3,
    event: int | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> tuple[dict[str, Any], Tensor]:
    """Arguments of `attention` for the last `count` steps, and evict_steps [C, Hk, N].

    Cell 0 evicts nothing; the others evict about 1/2, 2/3, ... of the rows before `event`.
    """
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    steps = torch.arange(tokens - count, tokens)
    event = tokens - count if event is None else event
    evict = torch.full((cells, kv_heads, tokens), tokens)
    for cell in range(1, cells):
        gone = torch.rand(kv_heads, tokens, generator=g) < cell / (cell + 1)
        gone[:, event:] = False
        evict[cell][gone] = event
    case = {
        "queries": 2.0 * normal(heads, count, dim),
        "keys": normal(kv_heads, tokens, dim),
        "values": normal(kv_heads, tokens, value_dim),
        "steps": steps,
        "rows": torch.arange(tokens),
        "first_visible": torch.zeros_like(steps) if window is None else (steps - window + 1).clamp_min(0),
        "scale": 0.9 / math.sqrt(dim),
        "softcap": softcap,
        "sink_logits": normal(heads) if sinks else None,
    }
    return case, evict


def loop(case: dict[str, Any], evict: Tensor) -> dict[str, Tensor]:
    """One cell, token by token: full, retained, evicted mean, mass [H, R, ...] in float64."""
    queries, keys, values = (case[name].double() for name in ("queries", "keys", "values"))
    (heads, count, dim), value_dim = queries.shape, values.shape[2]
    group = heads // keys.shape[0]
    full, retained, gone = (torch.zeros(heads, count, value_dim, dtype=torch.float64) for _ in range(3))
    mass = torch.zeros(heads, count, dtype=torch.float64)
    for h in range(heads):
        sink = None if case["sink_logits"] is None else float(case["sink_logits"][h])
        for j, t in enumerate(case["steps"].tolist()):
            query = queries[h, j].tolist()
            visible, left, lost = [], [], []
            for n, row in enumerate(case["rows"].tolist()):
                if not int(case["first_visible"][j]) <= row <= t:
                    continue
                key = keys[h // group, n].tolist()
                z = case["scale"] * math.fsum(query[d] * key[d] for d in range(dim))
                if case["softcap"] is not None:
                    z = case["softcap"] * math.tanh(z / case["softcap"])
                token = (z, values[h // group, n])
                visible.append(token)
                (left if t < int(evict[h // group, n]) else lost).append(token)
            full[h, j] = mean_over(visible, sink, value_dim)
            retained[h, j] = mean_over(left, sink, value_dim)
            gone[h, j] = mean_over(lost, None, value_dim)
            top = max([z for z, _ in visible] + ([] if sink is None else [sink]))
            total = math.fsum(
                [math.exp(z - top) for z, _ in visible] + ([] if sink is None else [math.exp(sink - top)])
            )
            mass[h, j] = math.fsum(math.exp(z - top) for z, _ in lost) / total
    return {"full": full, "retained": retained, "gone": gone, "mass": mass}


def mean_over(tokens: list[tuple[float, Tensor]], sink: float | None, value_dim: int) -> Tensor:
    out = torch.zeros(value_dim, dtype=torch.float64)
    if not tokens:
        return out
    top = max(z for z, _ in tokens)
    top = top if sink is None else max(top, sink)
    weights = [math.exp(z - top) for z, _ in tokens]
    total = math.fsum(weights) + (0.0 if sink is None else math.exp(sink - top))
    for weight, (_, value) in zip(weights, tokens, strict=True):
        out += weight / total * value
    return out


def gather(case: dict[str, Any], evict: Tensor, **options: Any) -> list[CellBlock]:
    """The blocks of every cell glued together along the steps."""
    blocks: list[list[CellBlock]] = [[] for _ in range(evict.shape[0])]
    for block in retained_attention(evict_steps=evict, **case, **options):
        blocks[block.cell].append(block)
    whole = slice(0, case["steps"].numel())
    glued = []
    for cell, parts in enumerate(blocks):
        arrays = [
            torch.cat([getattr(p, name) for p in parts], 1) for name in ("full", "retained", "error", "mass", "gap")
        ]
        glued.append(CellBlock(cell, whole, *arrays))
    return glued


SHAPES = {
    "multi-head": {"heads": 3, "kv_heads": 3, "dim": 80, "value_dim": 48, "tokens": 63, "count": 7},
    "group of 3": {"heads": 6, "kv_heads": 2, "dim": 80, "value_dim": 48, "tokens": 63, "count": 5},
    "group of 4": {"heads": 4, "kv_heads": 1, "dim": 33, "value_dim": 80, "tokens": 111, "count": 6},
    "one query": {"heads": 4, "kv_heads": 2, "dim": 80, "value_dim": 17, "tokens": 111, "count": 1},
    "window": {"heads": 4, "kv_heads": 2, "dim": 24, "value_dim": 24, "tokens": 63, "count": 20, "window": 13},
    "softcap": {"heads": 3, "kv_heads": 1, "dim": 80, "value_dim": 48, "tokens": 63, "count": 5, "softcap": 1.5},
    "sinks": {"heads": 4, "kv_heads": 2, "dim": 80, "value_dim": 48, "tokens": 63, "count": 5, "sinks": True},
    "all of it": {
        "heads": 6,
        "kv_heads": 2,
        "dim": 40,
        "value_dim": 24,
        "tokens": 111,
        "count": 9,
        "window": 31,
        "softcap": 2.0,
        "sinks": True,
    },
    "late event": {"heads": 4, "kv_heads": 2, "dim": 24, "value_dim": 16, "tokens": 63, "count": 20, "event": 51},
}


def check_against_loop(case: dict[str, Any], evict: Tensor, found: CellBlock, tolerance: float) -> None:
    expected = loop(case, evict)
    size = float(case["values"].abs().max())
    touched = expected["mass"] > 0
    torch.testing.assert_close(found.full, expected["full"], rtol=0, atol=tolerance * size)
    torch.testing.assert_close(found.retained, expected["retained"], rtol=0, atol=tolerance * size)
    error = expected["full"] - expected["retained"]
    torch.testing.assert_close(found.error, error, rtol=0, atol=tolerance * size)
    torch.testing.assert_close(found.mass, expected["mass"], rtol=1e3 * tolerance, atol=tolerance)
    gap = (expected["gone"] - expected["retained"]).norm(dim=-1)
    torch.testing.assert_close(found.gap[touched], gap[touched], rtol=0, atol=10 * tolerance * size)
    assert torch.equal(found.gap.isnan(), ~touched)
    assert bool((found.error[~touched] == 0).all())
    assert torch.equal(found.retained[~touched], found.full[~touched])


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("block", [None, 4])
def test_agrees_with_a_loop_over_tokens(name: str, block: int | None) -> None:
    case, evict = make_case(**SHAPES[name])
    found = gather(case, evict, block=block)
    assert len(found) == 3
    for cell, one in enumerate(found):
        check_against_loop(case, evict[cell], one, 1e-13)
    torch.testing.assert_close(attention(**case, block=block), found[0].full, rtol=0, atol=0)


def test_steps_that_see_one_chunk_and_rows_with_gaps() -> None:
    case, evict = make_case(4, 2, 24, 16, 63, 20)
    case["first_visible"] = case["steps"] // 16 * 16
    keep = torch.tensor([i for i in range(63) if i % 5])  # the pool of an evaluation, not the whole sequence
    case["rows"], evict = keep, evict[:, :, keep]
    case["keys"], case["values"] = case["keys"][:, keep], case["values"][:, keep]
    for cell, one in enumerate(gather(case, evict, block=7)):
        check_against_loop(case, evict[cell], one, 1e-13)


def test_eviction_in_the_middle_of_a_block() -> None:
    case, evict = make_case(4, 2, 24, 16, 63, 20, window=30, sinks=True)
    g = torch.Generator().manual_seed(5)
    rows = case["rows"].expand_as(evict)
    evict = torch.minimum(rows + 1 + torch.randint(0, 70, evict.shape, generator=g), torch.tensor(63))
    for block in (20, 6):
        for cell, one in enumerate(gather(case, evict, block=block)):
            check_against_loop(case, evict[cell], one, 1e-13)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_error_is_lost_mass_times_direction_gap(sinks: bool, softcap: float | None) -> None:
    case, evict = make_case(6, 2, 80, 48, 111, 9, cells=4, sinks=sinks, softcap=softcap)
    values = case["values"].repeat_interleave(3, 0)
    size = float(values.abs().max())
    for cell, one in enumerate(gather(case, evict)):
        torch.testing.assert_close(one.error, one.full - one.retained, rtol=0, atol=1e-12 * size)
        # f - f_R = 1/(1 - m) sum over evicted of a_i (u_i - f)
        weights = full_weights(case)  # [H, R, N]
        lost = case["steps"][:, None] >= evict[cell].repeat_interleave(3, 0)[:, None, :]  # [H, R, N]
        lost_weights = torch.where(lost, weights, 0.0)
        moved = lost_weights @ values - lost_weights.sum(-1, keepdim=True) * one.full
        left = 1 - one.mass[..., None]
        usable = (left > 1e-6)[..., 0]
        torch.testing.assert_close(
            (moved / left)[usable], one.error[usable], rtol=0, atol=1e-12 * size / float(left.min())
        )
        assert bool(usable.all())


def full_weights(case: dict[str, Any]) -> Tensor:
    group = case["queries"].shape[0] // case["keys"].shape[0]
    logits = case["scale"] * torch.einsum("htd,hnd->htn", case["queries"], case["keys"].repeat_interleave(group, 0))
    if case["softcap"] is not None:
        logits = case["softcap"] * torch.tanh(logits / case["softcap"])
    logits = logits.masked_fill(case["rows"][None, :] > case["steps"][:, None], float("-inf"))
    if case["sink_logits"] is None:
        return logits.softmax(-1)
    sinks = case["sink_logits"][:, None, None].expand(-1, logits.shape[1], 1)
    return torch.cat([logits, sinks], -1).softmax(-1)[..., :-1]


def test_one_evicted_token() -> None:
    case, evict = make_case(4, 2, 80, 48, 63, 5, cells=63 - 5, sinks=True)
    evict[:] = 63
    for token in range(58):
        evict[token, :, token] = 58
    weights, values = full_weights(case), case["values"].repeat_interleave(2, 0)
    size = float(values.abs().max())
    worst = 0.0
    for token, one in enumerate(gather(case, evict)):
        a = weights[:, :, token, None]
        expected = a / (1 - a) * (values[:, None, token] - one.full)
        worst = max(worst, float(((one.error - expected) * (1 - a)).abs().max()))
        torch.testing.assert_close(one.mass, a[..., 0], rtol=1e-12, atol=0)
    assert worst <= 1e-12 * size


@pytest.mark.parametrize("gap", [60.0, 85.0, 95.0, 100.0, 120.0, 400.0])
def test_a_retained_set_far_below_the_maximum_does_not_underflow(gap: float) -> None:
    case, evict = make_case(3, 3, 80, 48, 63, 4, cells=2, dtype=torch.float32)
    evict[:] = 63
    evict[1, :, 0] = 59  # the token that holds all attention leaves
    case["queries"][..., 0], case["keys"][..., 0] = 1.0, 0.0
    case["keys"][:, 0, 0] = gap / case["scale"]
    found, truth = gather(case, evict)[1], loop(case, evict[1])
    difference = (found.retained - truth["retained"]).norm(dim=-1) / truth["retained"].norm(dim=-1)
    assert float(difference.max()) < 5e-6
    error = truth["full"] - truth["retained"]
    assert float(((found.error - error).norm(dim=-1) / error.norm(dim=-1)).max()) < 5e-6
    assert float(found.mass.min()) > 0.999


@pytest.mark.parametrize("gap", [40.0, 60.0, 85.0])  # float32 itself ends at exp(-87)
def test_a_tiny_lost_mass_keeps_its_relative_precision(gap: float) -> None:
    case, evict = make_case(3, 3, 80, 48, 63, 4, cells=2, dtype=torch.float32)
    evict[:] = 63
    evict[1, :, 1:9] = 59
    case["queries"][..., 0], case["keys"][..., 0] = 1.0, 0.0
    case["keys"][:, 0, 0] = gap / case["scale"]
    found = gather(case, evict)[1]
    double = {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in case.items()}
    truth = gather(double, evict)[1]
    # A difference of outputs would be pure rounding here (1e-26 of the output); the product form is not.
    torch.testing.assert_close(found.mass.double(), truth.mass, rtol=2e-4, atol=1e-44)
    torch.testing.assert_close(found.gap.double(), truth.gap, rtol=1e-5, atol=0)
    assert float(found.mass.max()) > 0


def test_a_sink_far_above_everything_does_not_overflow() -> None:
    case, evict = make_case(4, 2, 24, 16, 63, 4, sinks=True, dtype=torch.float32)
    case["sink_logits"] = torch.tensor([0.0, 60.0, 100.0, 400.0])
    for cell, one in enumerate(gather(case, evict)):
        truth = loop(case, evict[cell])
        assert bool(one.full.isfinite().all())
        assert bool(one.error.isfinite().all())
        torch.testing.assert_close(one.full.double(), truth["full"], rtol=2e-4, atol=1e-6)
        torch.testing.assert_close(one.mass.double(), truth["mass"], rtol=2e-4, atol=1e-7)


def test_the_sink_takes_part_in_the_maximum() -> None:
    case, evict = make_case(2, 2, 24, 16, 63, 4, sinks=True, dtype=torch.float32)
    case["queries"] *= 0.01
    case["values"] *= 1e12
    case["sink_logits"] = torch.tensor([89.0, 90.0])  # exp(90 - largest logit) is beyond float32
    for cell, one in enumerate(gather(case, evict)):
        full = loop(case, evict[cell])["full"]
        assert float(full.norm(dim=-1).min()) > 1e-30
        assert float(((one.full - full).norm(dim=-1) / full.norm(dim=-1)).max()) < 1e-2


@pytest.mark.parametrize("sinks", [False, True])
def test_everything_evicted_leaves_the_zero_vector(sinks: bool) -> None:
    case, evict = make_case(4, 2, 24, 16, 63, 5, cells=1, sinks=sinks)
    evict[:] = 0
    one = gather(case, evict)[0]
    assert bool((one.retained == 0).all())
    assert torch.equal(one.error, one.full)
    sink_weight = 1 - full_weights(case).sum(-1)
    torch.testing.assert_close(one.mass, 1 - sink_weight, rtol=1e-12, atol=1e-12)
    assert bool((one.mass < 1).all()) == sinks


def test_a_sink_stays_in_the_denominator_when_one_token_is_left() -> None:
    case, evict = make_case(4, 2, 24, 16, 63, 5, cells=1, sinks=True)
    evict[:] = 0
    evict[0, :, 7] = 63
    one = gather(case, evict)[0]
    alone = case["values"][:, 7].repeat_interleave(2, 0)[:, None]
    assert bool((one.retained.norm(dim=-1) < 0.999 * alone.norm(dim=-1)).all())


def test_nothing_evicted_is_exactly_zero() -> None:
    for dtype in (torch.float32, torch.float64):
        case, evict = make_case(6, 2, 80, 48, 111, 9, window=40, sinks=True, dtype=dtype)
        evict[0, :, :60] = 70  # left the window before the first step: nothing that any step would see
        one = gather(case, evict)[0]
        assert bool((one.error == 0).all())
        assert bool((one.mass == 0).all())
        assert torch.equal(one.retained, one.full)
        assert bool(one.gap.isnan().all())


def test_steps_that_lose_nothing_inside_an_evicting_block_are_exactly_zero() -> None:
    case, evict = make_case(4, 2, 24, 16, 63, 20, cells=1, window=12)
    evict[:] = 63
    evict[0, :, 40] = 43  # seen up to step 51, the ninth of twenty
    one = gather(case, evict, block=20)[0]
    assert bool((one.error[:, 9:] == 0).all())
    assert torch.equal(one.retained[:, 9:], one.full[:, 9:])
    assert bool((one.error[:, :9].norm(dim=-1) > 0).all())


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("inside", [False, True])
def test_evicted_slots_cannot_reach_the_retained_output(poison: float, inside: bool) -> None:
    case, evict = make_case(4, 2, 80, 48, 63, 9, dtype=torch.float32)
    if inside:
        evict[evict < 63] = 57  # in the middle of the block: the first three steps still see them
    clean = gather(case, evict)
    for cell in (1, 2):
        gone = evict[cell] < 63
        dirty = dict(case)
        dirty["keys"], dirty["values"] = case["keys"].clone(), case["values"].clone()
        dirty["keys"][gone] = poison
        dirty["values"][gone] = poison
        found = gather(dirty, evict)[cell]
        first = 3 if inside else 0
        assert torch.equal(found.retained[:, first:], clean[cell].retained[:, first:])
        assert not torch.equal(found.full, clean[cell].full)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30])
def test_invisible_slots_change_nothing(poison: float) -> None:
    case, evict = make_case(4, 2, 80, 48, 63, 9, window=20, dtype=torch.float32)
    case["steps"] = case["steps"] - 5  # rows 58..62 are the future of every step
    case["first_visible"] = case["first_visible"] - 5
    evict = torch.where(evict < 63, 49, 63)
    clean = gather(case, evict)
    dirty = dict(case)
    dirty["keys"], dirty["values"] = case["keys"].clone(), case["values"].clone()
    hidden = torch.cat([torch.arange(30), torch.arange(58, 63)])
    dirty["keys"][:, hidden], dirty["values"][:, hidden] = poison, poison
    for before, after in zip(clean, gather(dirty, evict), strict=True):
        for name in ("full", "retained", "error", "mass", "gap"):
            assert torch.equal(getattr(before, name).nan_to_num(-1), getattr(after, name).nan_to_num(-1)), name
    # A slot that only later steps of the same block see must not reach the earlier ones.
    dirty["keys"][:, 55], dirty["values"][:, 55] = poison, poison
    for before, after in zip(clean, gather(dirty, evict), strict=True):
        assert torch.equal(before.full[:, :6], after.full[:, :6])
        assert torch.equal(before.retained[:, :6], after.retained[:, :6])
        assert not torch.equal(before.full[:, 6], after.full[:, 6])


def test_float32_against_float64_on_the_worst_row() -> None:
    case, evict = make_case(6, 2, 80, 48, 211, 40, cells=4, sinks=True, dtype=torch.float32)
    double = {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in case.items()}
    for single, truth in zip(gather(case, evict), gather(double, evict), strict=True):
        assert single.error.dtype == torch.float32
        assert truth.error.dtype == torch.float64
        for name in ("full", "retained", "error"):
            a, b = getattr(single, name).double(), getattr(truth, name)
            worst = ((a - b).norm(dim=-1) / truth.full.norm(dim=-1)).max()
            assert float(worst) < 3e-6, name


def test_the_block_size_changes_no_more_than_rounding() -> None:
    case, evict = make_case(6, 2, 80, 48, 111, 23, window=50)
    whole = gather(case, evict, block=23)
    for block in (1, 5, 64):
        for one, other in zip(whole, gather(case, evict, block=block), strict=True):
            torch.testing.assert_close(one.error, other.error, rtol=0, atol=1e-14)
            torch.testing.assert_close(one.retained, other.retained, rtol=0, atol=1e-14)


def test_blocks_come_in_order_and_share_the_full_output() -> None:
    case, evict = make_case(4, 2, 24, 16, 63, 7)
    found = list(retained_attention(evict_steps=evict, **case, block=3))
    assert [(b.rows.start, b.rows.stop, b.cell) for b in found] == [
        (start, stop, cell) for start, stop in ((0, 3), (3, 6), (6, 7)) for cell in range(3)
    ]
    assert all(b.full is found[b.rows.start].full for b in found)


def test_many_cells_make_shorter_blocks_and_the_same_numbers() -> None:
    case, evict = make_case(4, 4, 8, 256, 63, 40, dtype=torch.float32)
    many = evict[1:2].expand(500, -1, -1)
    blocks = [b for b in retained_attention(evict_steps=many, **case) if b.cell == 499]
    assert [b.rows.stop - b.rows.start for b in blocks] == [32, 8]
    alone = gather(case, evict[1:2])[0]
    torch.testing.assert_close(torch.cat([b.error for b in blocks], 1), alone.error, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"queries": torch.zeros(5, 5, 24)}, "evenly"),
        ({"queries": torch.zeros(4, 5, 23)}, "do not fit"),
        ({"keys": torch.zeros(2, 63, 24, dtype=torch.float64)}, "float32"),
        ({"queries": torch.zeros(4, 5, 24, dtype=torch.float16)}, "float32"),
        ({"values": torch.zeros(2, 62, 16)}, "do not fit"),
        ({"values": torch.zeros(63, 16)}, "three dimensions"),
        ({"steps": torch.arange(4)}, "steps"),
        ({"rows": torch.zeros(63)}, "rows"),
        ({"first_visible": torch.zeros(6, dtype=torch.int64)}, "first_visible"),
        ({"softcap": 0.0}, "softcap"),
        ({"sink_logits": torch.zeros(3)}, "sink_logits"),
        ({"evict_steps": torch.zeros(3, 4, 63, dtype=torch.int64)}, "evict_steps"),
        ({"evict_steps": torch.zeros(3, 2, 63)}, "integers"),
        ({"block": 0}, "block"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_at_the_call(change: dict[str, Any], words: str) -> None:
    case, evict = make_case(4, 2, 24, 16, 63, 5, dtype=torch.float32)
    arguments = {**case, "evict_steps": evict, **change}
    with pytest.raises(ValueError, match=words):
        retained_attention(**arguments)
