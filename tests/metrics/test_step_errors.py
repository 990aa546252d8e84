"""What is collected at every step, against plain loops in float64."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from kvtool.errors import KvtoolError
from kvtool.layer import Layer
from kvtool.metrics import StepErrors, evaluate_layer
from kvtool.retained import Event, RetainedSet

torch.set_num_threads(1)

HEADS, KV_HEADS, DIM, VALUE_DIM, WIDTH, TOKENS, PROMPT = 6, 2, 40, 24, 17, 63, 50


def make_layer(
    *, window: int | None = None, projection: bool = True, dtype: torch.dtype = torch.float64, **options: object
) -> Layer:
    g = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    return Layer.from_arrays(
        2.0 * normal(HEADS, TOKENS - 7, DIM),  # the queries of the first rows were not captured
        normal(KV_HEADS, TOKENS, DIM),
        normal(KV_HEADS, TOKENS, VALUE_DIM),
        prompt_length=PROMPT,
        scale=0.15,
        query_steps=torch.arange(7, TOKENS),
        output_projection=normal(HEADS, VALUE_DIM, WIDTH) if projection else None,
        window=window,
        dtype=dtype,
        **options,  # type: ignore[arg-type]
    )


def make_event(step: int = PROMPT, first: int = 0) -> Event:
    none = torch.zeros(KV_HEADS)
    return Event(step, torch.arange(first, step), *[none] * 6, sinks=4, window=8)


def evicting(*rows: int, step: int = PROMPT) -> RetainedSet:
    evict = RetainedSet.keep_all(KV_HEADS, TOKENS).evict_step.clone()
    evict[:, list(rows)] = step
    return RetainedSet(evict, [make_event(step)])


def weights_of(layer: Layer, head: int, step: int, rows: list[int]) -> Tensor:
    """Softmax over `rows` at `step`, sink in the denominator."""
    geometry = layer.geometry
    query = layer.queries[head, int((layer.query_steps == step).nonzero())]
    logits = [geometry.scale * float(query @ layer.keys[head // geometry.group, i]) for i in rows]
    total = math.fsum(math.exp(z) for z in logits)
    if geometry.sink_logits is not None:
        total += math.exp(float(geometry.sink_logits[head]))
    return torch.tensor([math.exp(z) / total for z in logits], dtype=torch.float64)


def output_of(layer: Layer, head: int, step: int, rows: list[int]) -> Tensor:
    if not rows:
        return torch.zeros(VALUE_DIM, dtype=torch.float64)
    return weights_of(layer, head, step, rows) @ layer.values[head // layer.geometry.group, rows]


def loop(layer: Layer, cell: RetainedSet, steps: list[int], pool: list[int] | None = None) -> StepErrors:
    heads = layer.geometry.query_heads
    shape = (heads, len(steps))
    found = {
        name: torch.full(shape, float("nan"), dtype=torch.float64)
        for name in ("squared_error", "squared_output", "mass", "gap", "cosine")
    }
    layer_error, layer_output = torch.zeros(len(steps)).double(), torch.zeros(len(steps)).double()
    for j, t in enumerate(steps):
        first = int(layer.geometry.first_visible(torch.tensor(t)))
        visible = pool if pool is not None else list(range(first, t + 1))
        moved, projected = torch.zeros(WIDTH).double(), torch.zeros(WIDTH).double()
        for h in range(heads):
            leaves = cell.evict_step[h // layer.geometry.group]
            left = [i for i in visible if t < int(leaves[i])]
            lost = [i for i in visible if t >= int(leaves[i])]
            full, rest = output_of(layer, h, t, visible), output_of(layer, h, t, left)
            found["squared_error"][h, j] = (full - rest).square().sum()
            found["squared_output"][h, j] = full.square().sum()
            share = weights_of(layer, h, t, visible)
            found["mass"][h, j] = sum(float(a) for a, i in zip(share, visible, strict=True) if i in lost)
            if lost:
                gone = weights_of(layer, h, t, lost)
                gone = gone / gone.sum()  # the sink is no evicted token
                found["gap"][h, j] = (gone @ layer.values[h // layer.geometry.group, lost] - rest).norm()
            if rest.norm() > 0 and full.norm() > 0:
                found["cosine"][h, j] = 1 - float(full @ rest / (full.norm() * rest.norm()))
            if layer.output_projection is not None:
                moved += (full - rest) @ layer.output_projection[h]
                projected += full @ layer.output_projection[h]
        layer_error[j], layer_output[j] = moved.square().sum(), projected.square().sum()
    has = layer.output_projection is not None
    return StepErrors(
        torch.tensor(steps),
        **found,
        **({"layer_squared_error": layer_error, "layer_squared_output": layer_output} if has else {}),
    )


def assert_equal_errors(found: StepErrors, expected: StepErrors) -> None:
    for field in dataclasses.fields(StepErrors):
        a, b = getattr(found, field.name), getattr(expected, field.name)
        if b is None:
            assert a is None, field.name
        else:
            torch.testing.assert_close(
                a, b, rtol=1e-11, atol=1e-13, equal_nan=True, msg=lambda m, f=field: f"{f.name}: {m}"
            )


@pytest.mark.parametrize("case", ["plain", "window", "sinks", "no projection"])
def test_every_quantity_agrees_with_a_loop(case: str) -> None:
    options = {"window": 20} if case == "window" else {}
    if case == "sinks":
        options["sink_logits"] = torch.linspace(-2, 3, HEADS)
    layer = make_layer(projection=case != "no projection", **options)
    cells = [evicting(), evicting(*range(4, 45)), evicting(*range(PROMPT)), evicting(30, 47)]
    steps = [50, 51, 55, 58, 62]
    for cell, one in zip(cells, evaluate_layer(layer, cells, torch.tensor(steps), block=2), strict=True):
        assert_equal_errors(one, loop(layer, cell, steps))


def test_a_pool_is_seen_whole_and_alone() -> None:
    layer = make_layer(window=20)
    event = make_event(first=PROMPT - 19)
    cells = [dataclasses.replace(evicting(*rows), events=[event]) for rows in ([], range(35, 46), range(31, 50))]
    steps = list(range(PROMPT, TOKENS))
    pool = list(range(PROMPT - 19, PROMPT))
    for cell, one in zip(cells, evaluate_layer(layer, cells, torch.tensor(steps), mode="pool"), strict=True):
        assert_equal_errors(one, loop(layer, cell, steps, pool))
    emptied = evaluate_layer(layer, cells, torch.tensor(steps), mode="pool")[2]
    assert torch.equal(emptied.squared_error, emptied.squared_output)
    assert bool(emptied.cosine.isnan().all())


def test_nothing_evicted_is_exactly_zero_everywhere() -> None:
    for dtype in (torch.float32, torch.float64):
        (one,) = evaluate_layer(make_layer(dtype=dtype), [evicting()], torch.arange(PROMPT, TOKENS))
        assert bool((one.squared_error == 0).all())
        assert bool((one.cosine == 0).all())
        assert bool((one.mass == 0).all())
        assert bool((one.layer_squared_error == 0).all())
        assert bool(one.gap.isnan().all())


def test_sums_are_float64_and_close_to_float64_throughout() -> None:
    cells, steps = [evicting(*range(4, 45))], torch.arange(PROMPT, TOKENS)
    (single,), (double,) = (evaluate_layer(make_layer(dtype=d), cells, steps) for d in (torch.float32, torch.float64))
    for field in dataclasses.fields(StepErrors):
        a, b = getattr(single, field.name), getattr(double, field.name)
        if isinstance(b, Tensor) and field.name != "steps":
            assert a.dtype == torch.float64
            torch.testing.assert_close(a, b, rtol=2e-5, atol=0, equal_nan=True)


def test_a_step_without_a_query_is_refused() -> None:
    with pytest.raises(KvtoolError) as caught:
        evaluate_layer(make_layer(), [evicting()], torch.tensor([3, 55]))
    assert caught.value.code == "trace-lacks"


def test_nan_in_the_trace_is_an_error_and_not_a_number_left_out() -> None:
    layer = make_layer()
    layer.values[1, 52, 3] = float("nan")
    with pytest.raises(KvtoolError) as caught:
        evaluate_layer(layer, [evicting()], torch.arange(PROMPT, TOKENS))
    assert caught.value.code == "not-finite"


def test_a_pool_needs_one_event_that_all_cells_share() -> None:
    steps = torch.arange(PROMPT, TOKENS)
    for cells in ([RetainedSet.keep_all(KV_HEADS, TOKENS)], [evicting(), evicting(step=48)]):
        with pytest.raises(KvtoolError) as caught:
            evaluate_layer(make_layer(), cells, steps, mode="pool")
        assert caught.value.code == "usage"


def test_cells_that_decided_the_same_are_measured_once_and_each_has_its_numbers() -> None:
    layer, steps = make_layer(), torch.arange(PROMPT, TOKENS)
    cells = [evicting(), evicting(3, 5, 8), evicting(), evicting(4), evicting(3, 5, 8)]
    found = evaluate_layer(layer, cells, steps)
    assert [found.index(one) for one in found] == [0, 1, 0, 3, 1]
    for cell, one in zip(cells, found, strict=True):
        assert_equal_errors(one, loop(layer, cell, steps.tolist()))
