"""Error norms of many sets against the reference, which holds whole vectors and gives every set its own softmax."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvtool.kernels.retained_attention.errors import CellErrors, cell_errors, serves
from kvtool.kernels.retained_attention.evaluated import Evaluated
from kvtool.kernels.retained_attention.families import families_of
from kvtool.kernels.retained_attention.reference import retained_attention
from kvtool.metrics import StepErrors
from kvtool.metrics.step_errors import measure

torch.set_num_threads(1)


def make_case(
    *,
    heads: int = 6,
    kv_heads: int = 2,
    dim: int = 16,
    value_dim: int = 12,
    tokens: int = 111,
    count: int = 37,
    cells: int = 7,
    moving: bool = False,
    nested: bool = False,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    steps: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> dict[str, Any]:
    """Arguments of `cell_errors`. Cell 0 evicts nothing, the last one everything that was there at the first step."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    steps = torch.arange(tokens - count, tokens) if steps is None else steps
    count, event = len(steps), int(steps[0])
    evict = torch.full((cells, kv_heads, tokens), tokens)
    for cell in range(1, cells):
        order = torch.stack([torch.randperm(event, generator=g) for _ in range(kv_heads)])
        if nested:
            g2 = torch.Generator().manual_seed(seed + cell // 4)
            order = torch.stack([torch.randperm(event, generator=g2) for _ in range(kv_heads)])
        gone = order < event * (cell % 4 + 1) // 5 if cell < cells - 1 else order < event
        when = torch.full_like(order, event)
        if moving:
            when = torch.randint(event, tokens + 1, order.shape, generator=g)
        evict[cell, :, :event] = torch.where(gone, when, tokens)
    first = torch.zeros_like(steps)
    if window is not None:
        first = (steps - window + 1).clamp_min(0)
    if chunk is not None:
        first = steps // chunk * chunk
    rows = torch.arange(count) * 3 % count
    rows[::5] = -1
    return {
        "queries": 2.0 * normal(heads, count, dim),
        "keys": normal(kv_heads, tokens, dim),
        "values": normal(kv_heads, tokens, value_dim),
        "evict_steps": evict,
        "steps": steps,
        "rows": torch.arange(tokens),
        "first_visible": first,
        "scale": 0.9 / math.sqrt(dim),
        "softcap": softcap,
        "sink_logits": normal(heads) if sinks else None,
        "projection": normal(heads, value_dim, 10),
        "gradients": normal(3, heads, count, value_dim),
        "gradient_rows": rows,
    }


def reference(case: dict[str, Any]) -> list[StepErrors]:
    """The same in float64 by the reference."""
    wide = {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in case.items()}
    projection, gradients, rows = (wide.pop(name) for name in ("projection", "gradients", "gradient_rows"))
    arrays = [wide.pop(name) for name in ("queries", "keys", "values", "evict_steps")]
    return measure(
        retained_attention(*arrays, **wide),
        case["steps"],
        len(case["evict_steps"]),
        projection=projection,
        output_gradients=gradients,
        gradient_rows=rows,
    )


def expect_equal(
    found: CellErrors, expected: list[StepErrors], tolerance: float, which: str = "all", least: float = 0.0
) -> None:
    """Every number, the worst one counts; what is exactly 0 or undefined is so on both sides.

    Args:
        least: numbers this small are 0, where their vectors cannot be held.
    """
    assert len(found.squared_error) == len(expected)
    for cell, wanted in enumerate(expected):
        pairs = [
            ("squared_output", found.squared_output, wanted.squared_output),
            ("squared_error", found.squared_error[cell], wanted.squared_error),
            ("layer_squared_output", found.layer_squared_output, wanted.layer_squared_output),
            ("layer_squared_error", found.layer_squared_error[cell], wanted.layer_squared_error),
        ]
        if which == "all":
            pairs += [(name, getattr(found, name)[cell], getattr(wanted, name)) for name in ("mass", "gap", "cosine")]
        for name, mine, theirs in pairs:
            assert torch.equal(mine.isnan(), theirs.isnan()), (name, cell)
            lowest = max(least, 1e-30) if name == "cosine" and least else least
            mine, theirs = (torch.where(x.nan_to_num() > lowest, x, 0.0).nan_to_num() for x in (mine, theirs))
            assert torch.equal(mine == 0, theirs == 0), (name, cell)
            # an angle is known no better than its two vectors: the reference's own rounding is 1e-16 of 1
            floor, times = (1e-6, 30) if name == "cosine" else (1e-300, 1)
            worst = ((mine - theirs).abs() / theirs.abs().clamp_min(floor)).max()
            assert float(worst) <= tolerance * times, (name, cell, float(worst))
        dots, theirs = found.gradient_dot[cell].double(), wanted.gradient_dot.double()
        assert torch.equal(dots.isnan(), theirs.isnan())
        assert bool(
            ((dots - theirs).abs().nan_to_num() <= tolerance * theirs.nan_to_num().abs().max() + least**0.5).all()
        )


SHAPES: list[dict[str, Any]] = [
    {},
    {"nested": True, "cells": 11},
    {"heads": 3, "kv_heads": 1, "dim": 80, "value_dim": 64, "tokens": 63},
    {"heads": 4, "kv_heads": 4, "dim": 24, "value_dim": 16, "sinks": True},
    {"window": 30},
    {"window": 9, "sinks": True, "count": 60},
    {"chunk": 16, "softcap": 3.0},
    {"softcap": 2.0, "sinks": True, "nested": True},
    {"moving": True},
    {"moving": True, "window": 25, "sinks": True, "cells": 9},
    {"count": 1},
    {"tokens": 2, "count": 1, "cells": 3},
    {"steps": torch.tensor([60, 61, 75, 90, 110])},
]


@pytest.mark.parametrize("block", [None, 5])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_number_is_the_references(shape: dict[str, Any], block: int | None) -> None:
    case = make_case(**shape)
    expect_equal(cell_errors(**case, block=block), reference(case), 1e-12)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_errors_alone_are_the_references(shape: dict[str, Any]) -> None:
    case = make_case(**shape)
    found = cell_errors(**case, which="errors")
    expect_equal(found, reference(case), 1e-9, which="errors")
    assert bool(found.mass.isnan().all() and found.gap.isnan().all() and found.cosine.isnan().all())


def known(case: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """f_V [H, R, Dv] and the log-sum-exp [H, R] of all visible logits and the sink, one query at a time."""
    queries, keys, values = case["queries"], case["keys"], case["values"]
    full = torch.zeros(*queries.shape[:2], values.shape[2], dtype=queries.dtype)
    sums = torch.full(queries.shape[:2], -math.inf, dtype=queries.dtype)
    for head, own in enumerate(queries):
        kv_head = head // (len(queries) // len(keys))
        for place, (query, step) in enumerate(zip(own, case["steps"].tolist(), strict=True)):
            seen = (case["rows"] <= step) & (case["rows"] >= case["first_visible"][place])
            z = case["scale"] * (keys[kv_head, seen] @ query)
            if case["softcap"] is not None:
                z = case["softcap"] * (z / case["softcap"]).tanh()
            every = z if case["sink_logits"] is None else torch.cat([z, case["sink_logits"][head, None]])
            sums[head, place] = every.logsumexp(0)
            full[head, place] = (z - sums[head, place]).exp() @ values[kv_head, seen]
    return full, sums


@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_an_output_that_is_known_is_not_needed_again(shape: dict[str, Any], few: bool) -> None:
    """Of the tokens that every cell evicts nothing is then read, unless a mass is small."""
    case = make_case(**shape)
    if few:
        case["evict_steps"] = case["evict_steps"][-2:]
    full, sums = known(case)
    expected = reference(case)
    expect_equal(cell_errors(**case, which="errors", full=full), expected, 1e-9, which="errors")
    expect_equal(cell_errors(**case, which="errors", full=full, log_sum_exp=sums), expected, 1e-9, which="errors")


def test_tokens_that_no_cell_keeps_are_read_only_for_small_masses() -> None:
    case = make_case(cells=3)
    case["evict_steps"] = case["evict_steps"][1:2]
    full, sums = known(case)
    gone = case["evict_steps"][0] < 111
    case["keys"][gone], case["values"][gone] = 50.0, 50.0  # not what f_V was made of: nobody may look
    found = cell_errors(**case, which="errors", full=full, log_sum_exp=sums)
    untouched = make_case(cells=3)
    untouched["evict_steps"] = untouched["evict_steps"][1:2]
    expect_equal(found, reference(untouched), 1e-9, which="errors")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_float32_is_within_rounding(shape: dict[str, Any]) -> None:
    case = make_case(**shape, dtype=torch.float32)
    expect_equal(cell_errors(**case), reference(case), 3e-5)


@pytest.mark.parametrize("which", ["all", "errors"])
@pytest.mark.parametrize("gap", [60.0, 88.0, 95.0, 100.0, 104.0, 400.0])
@pytest.mark.parametrize("heavy_goes", [True, False])
def test_sets_far_below_the_largest_logit_do_not_underflow(gap: float, heavy_goes: bool, which: Any) -> None:
    """Between 88 and 103 an exponential relative to the row's maximum is finite in float32, and wrong."""
    case = make_case(dtype=torch.float32, cells=4, softcap=None)
    case["queries"][..., 0] = 4.0
    case["keys"][:, 3, 0] = gap / (4.0 * case["scale"])
    case["evict_steps"][1:, :, 3] = int(case["steps"][0]) if heavy_goes else 111
    case["evict_steps"][1:, :, 40:] = 111  # something stays, and something goes
    case["evict_steps"][1:, :, 5:20] = int(case["steps"][0])
    expect_equal(cell_errors(**case, which=which), reference(case), 3e-4, which, least=1e-70)


def test_memory_that_nobody_wrote_is_read_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = Tensor.new_empty

    def poisoned(self: Tensor, *size: Any, **options: Any) -> Tensor:
        made = empty(self, *size, **options)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    for shape in ({"nested": True, "cells": 11}, {"moving": True, "sinks": True}):
        case = make_case(**shape)
        expected = reference(case)
        with monkeypatch.context() as patch:
            patch.setattr(Tensor, "new_empty", poisoned)
            found = cell_errors(**case)
        expect_equal(found, expected, 1e-12)


def test_small_masses_are_taken_from_the_evicted_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """f_V - f_R would be rounding alone: the mass is 1e-9, and float32 has seven digits."""
    case = make_case(dtype=torch.float32, cells=3)
    case["queries"][..., 0], case["keys"][..., 0] = 4.0, 0.0
    case["keys"][:, 50, 0] = 21.0 / (4.0 * case["scale"])
    case["evict_steps"][:, :, 50] = 111
    found = cell_errors(**case, which="errors")
    expected = reference(case)
    assert float(expected[1].mass.max()) < 1e-5
    expect_equal(found, expected, 1e-4, which="errors")


def test_rows_without_anything_visible_or_retained_are_zero_and_undefined() -> None:
    case = make_case(cells=2)
    case["first_visible"][4] = 111  # sees nothing at all
    case["evict_steps"][1] = 0  # retains nothing, its own tokens neither
    found = cell_errors(**case)
    expect_equal(found, reference(case), 1e-12)
    assert float(found.squared_output[:, 4].abs().max()) == 0.0
    assert bool((found.squared_error[1] == found.squared_output).double().mean() > 0.9)


@pytest.mark.parametrize("which", ["all", "errors"])
def test_equal_sets_have_equal_numbers_to_the_bit(which: Any) -> None:
    case = make_case(cells=9, nested=True, dtype=torch.float32)
    case["evict_steps"][7] = case["evict_steps"][2]
    case["evict_steps"][5, 1] = case["evict_steps"][1, 1]  # in one KV head alone
    case["evict_steps"][4] = torch.where(case["evict_steps"][2] == 74, 60, 500)  # earlier, and for ever: as good as 2
    found = cell_errors(**case, which=which)
    for one, other, heads in ((2, 7, slice(None)), (2, 4, slice(None)), (1, 5, slice(3, 6))):
        for name in ("squared_error", "mass", "gap", "cosine"):
            mine, theirs = (getattr(found, name)[cell, heads] for cell in (one, other))
            assert torch.equal(mine.nan_to_num(-1.0), theirs.nan_to_num(-1.0)), name
        dots = found.gradient_dot
        assert torch.equal(dots[one, :, heads].nan_to_num(), dots[other, :, heads].nan_to_num())
    assert torch.equal(found.layer_squared_error[2], found.layer_squared_error[7])
    assert torch.equal(found.layer_squared_error[2], found.layer_squared_error[4])
    expect_equal(found, reference(case), 1e-4, which)


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32])
def test_narrow_integers_say_the_same(dtype: torch.dtype) -> None:
    case = make_case(moving=True)
    expected = cell_errors(**case)
    case["evict_steps"] = case["evict_steps"].to(dtype)
    assert torch.equal(cell_errors(**case).squared_error, expected.squared_error)


def test_no_cells_still_measure_the_output() -> None:
    case = make_case()
    case["evict_steps"] = case["evict_steps"][:0]
    expected = reference(make_case())[0]
    found = cell_errors(**case)
    torch.testing.assert_close(found.squared_output, expected.squared_output, rtol=1e-12, atol=0)
    assert found.squared_error.shape == (0, 6, 37)


def test_values_that_norms_cannot_sum_are_left_to_the_reference() -> None:
    values = torch.ones(1, 4, 3)
    assert serves(values)
    for odd in (float("nan"), float("inf"), 1e30, 1e-30):
        assert not serves(torch.cat([values, torch.full((1, 1, 3), odd)], dim=1))
    assert serves(torch.cat([values, torch.zeros(1, 1, 3)], dim=1))


def test_a_family_cuts_the_tokens_and_loses_none() -> None:
    g = np.random.default_rng(3)
    for trial in range(40):
        tokens, cells = int(g.integers(0, 300)), int(g.integers(1, 14))
        ranks = [g.permutation(tokens) for _ in range(3)]
        kept = np.stack([ranks[g.integers(3)] < g.integers(0, tokens + 1) for _ in range(cells)])
        found = families_of(torch.from_numpy(kept), bool(trial % 2))
        together = [cell for family in found for chain in family.chains for cell in chain.cells]
        assert sorted(together) == list(range(cells))
        for family in found:
            assert sorted(family.order.tolist()) == list(range(tokens))
            for chain, levels in zip(family.chains, family.levels, strict=True):
                for place, cell in enumerate(chain.cells):
                    mine = [
                        token
                        for atom, level in enumerate(levels)
                        if level > place
                        for token in family.order[family.bounds[atom] : family.bounds[atom + 1]].tolist()
                    ]
                    assert sorted(mine) == np.flatnonzero(kept[cell]).tolist()
            chunks = family.chunks(0, family.atoms)
            covered = [place for chunk in chunks for _, low, high in chunk for place in range(low, high)]
            assert covered == list(range(tokens))


def test_no_other_group_decides_a_digit() -> None:
    case = make_case(cells=11, nested=True, dtype=torch.float32)
    groups = [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2]
    case["evict_steps"][5] = case["evict_steps"][1]
    together = cell_errors(**case, groups=groups)
    for group in range(3):
        mine = [cell for cell, of in enumerate(groups) if of == group]
        alone = cell_errors(**{**case, "evict_steps": case["evict_steps"][mine]}, groups=[group] * len(mine))
        for name in ("squared_error", "mass", "gap", "cosine", "layer_squared_error", "gradient_dot"):
            found, expected = getattr(together, name)[mine], getattr(alone, name)
            assert torch.equal(found.nan_to_num(-1.0), expected.nan_to_num(-1.0)), name


def test_cells_too_unlike_for_a_family_are_all_there() -> None:
    g = torch.Generator().manual_seed(1)
    kept = torch.rand(40, 70_000, generator=g) < 0.5  # far more atoms than a family may have
    found = families_of(kept, True)
    assert sorted(cell for family in found for chain in family.chains for cell in chain.cells) == list(range(40))


def test_nested_sets_make_one_chain_and_two_rankings_one_family() -> None:
    order, other = torch.randperm(4000), torch.randperm(4000)
    cuts = (2000, 1200, 800, 400, 200)
    one = torch.stack([order < cut for cut in cuts])
    (family,) = families_of(one, True)
    assert [chain.cells for chain in family.chains] == [[0, 1, 2, 3, 4]]
    assert family.atoms == 6
    assert family.kept_atoms == 5
    (family,) = families_of(torch.cat([one, torch.stack([other < cut for cut in cuts])]), True)
    assert len(family.chains) == 2
    assert family.atoms == 36


def test_a_kernel_that_forgets_a_tile_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(count=80)
    whole = Evaluated.vectors

    def forgetful(self: Evaluated) -> Any:
        return iter(()) if self.part.start else whole(self)

    monkeypatch.setattr(Evaluated, "vectors", forgetful)
    found = cell_errors(**case, block=40)
    assert bool(found.squared_error[:, :, 40:].isnan().all())
    assert not bool(found.squared_error[:, :, :40].isnan().any())
