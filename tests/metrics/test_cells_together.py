"""What is said of many cells at once is what is said of each alone, to the bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvtool.example_layer import example_layer
from kvtool.layer import Geometry, Gradients
from kvtool.metrics import StepErrors, ages, built_in_metrics
from kvtool.metrics.age_statistics import Held
from kvtool.metrics.ages import ages_of_cells
from kvtool.metrics.output_error import nanquantiles
from kvtool.metrics.step_errors import all_finite, between
from kvtool.metrics.trial import measured, one_event, then
from kvtool.retained import RetainedSet

DRAWN = Gradients(2, 30, "continuation", (16, 46), 30, 0)


def cells() -> tuple[Geometry, list[StepErrors], list[RetainedSet]]:
    """Nested and other sets, no event and two of them, steps without output and without a gradient."""
    layer = example_layer(47, seed=3)
    one = one_event(layer, 16, 6, seed=1)
    nested = replace(one, evict_step=torch.where(one.evict_step < 47, 16, 47).to(torch.int32))
    sets = [one, nested, one_event(layer, 16, 9, seed=2), RetainedSet.keep_all(layer.geometry.kv_heads, 47)]
    sets.append(then(one_event(layer, 16, 9, seed=2), one_event(layer, 30, 7, seed=4)))
    found = measured(layer, sets, 16)
    heads, steps = found[0].squared_error.shape
    output = found[0].squared_output.clone()
    output[0, 3] = output[1] = 0.0
    for index, errors in enumerate(found):
        dot = torch.randn(2, heads, steps, generator=torch.Generator().manual_seed(index))
        dot[:, :, :4] = torch.nan
        found[index] = replace(errors, squared_output=output, gradient_dot=dot, gradients=DRAWN, drawn_steps=26)
    return layer.geometry, found, sets


@pytest.mark.parametrize("name", list(built_in_metrics()))
@pytest.mark.parametrize("without", ["nothing", "gradient", "projection"])
def test_a_metric_of_many_cells_is_that_of_each(name: str, without: str) -> None:
    geometry, errors, retained = cells()
    if without == "gradient":
        errors = [replace(each, gradient_dot=None, gradients=None) for each in errors]
    if without == "projection":
        errors = [replace(each, layer_squared_error=None, layer_squared_output=None) for each in errors]
    metric = built_in_metrics()[name]
    together = metric.partials(errors, geometry, retained)
    alone = [metric.partial(mine, geometry, kept) for mine, kept in zip(errors, retained, strict=True)]
    for both, one in zip(together, alone, strict=True):
        assert both.keys() == one.keys()
        for field, values in one.items():
            assert both[field].dtype == values.dtype, field
            torch.testing.assert_close(both[field], values, rtol=0, atol=0, equal_nan=True, msg=f"{name}: {field}")


@pytest.mark.parametrize("start", [16, 25])
def test_steps_cut_out_of_many_cells_are_those_of_each(start: int) -> None:
    _, errors, _ = cells()
    errors[2] = replace(errors[2], gradient_dot=None, gradients=None)
    for both, mine in zip(between(errors, start, 47), errors, strict=True):
        one = mine.between(start, 47)
        assert both.drawn_steps == one.drawn_steps
        assert both.future_mass is None
        for field in ("steps", "squared_error", "squared_output", "gap", "layer_squared_error", "gradient_dot"):
            torch.testing.assert_close(getattr(both, field), getattr(one, field), rtol=0, atol=0, equal_nan=True)


def test_quantiles_are_torch_s() -> None:
    values = torch.randn(5, 3, 63, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    values[values > 1.5] = torch.nan
    values[2, 1] = torch.nan
    values[3, 0, 1:] = torch.nan
    shares = torch.tensor([0.5, 0.95, 0.99, 1.0, 0.0], dtype=torch.float64)
    found, undefined = nanquantiles(values, shares)
    torch.testing.assert_close(found, torch.nanquantile(values, shares, dim=-1), rtol=0, atol=0, equal_nan=True)
    assert undefined.tolist() == values.isnan().sum(-1).tolist()


@pytest.mark.parametrize("window", [None, 17])
def test_ages_of_many_cells_are_those_of_each(window: int | None) -> None:
    geometry, _, retained = cells()
    kind: dict[str, Any] = {} if window is None else {"kind": "sliding", "window": window}
    geometry = replace(geometry, **kind)
    protection = {"prompt_length": 20, "sinks": 2, "window": 5, "frozen_after": 1}
    together = ages_of_cells(retained, geometry, **protection)
    alone = [ages(kept, geometry, **protection) for kept in retained]
    assert together == alone
    assert [len(entries) for entries in together] == [geometry.kv_heads * n for n in (2, 2, 2, 1, 3)]


def test_empty_and_full_caches_side_by_side() -> None:
    mask = np.array([[False] * 9, [True] * 9, [False, True] + [False] * 7])
    empty, full, one = Held(mask, first=4).statistics("kept")
    assert empty["kept_tokens"] == 0
    assert empty["kept_age_mean"] is None
    assert empty["kept_age_histogram"] == []
    assert (full["kept_age_min"], full["kept_age_p50"], full["kept_age_max"], full["kept_age_mean"]) == (1, 5.0, 9, 5.0)
    assert full["kept_age_histogram"] == [1, 2, 4, 2]
    assert (one["kept_age_min"], one["kept_age_p90"], one["kept_age_max"]) == (8, 8.0, 8)
    assert one["kept_age_histogram"] == [0, 0, 0, 1]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_shows_in_the_extremes(bad: float) -> None:
    values = torch.zeros(3, 2048)
    assert all_finite(values)
    assert all_finite(values[:0])
    values[1, 1030] = bad
    assert not all_finite(values)
