"""predicted_kl against a plain loop over draws, windows, steps, layers and heads, and against exact quadratic forms."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kvtool.errors import KvtoolError
from kvtool.layer import Gradients, Layer
from kvtool.metrics import PredictedKL, Whole, evaluate_layer, token_shares
from kvtool.metrics.student_t import two_sided
from kvtool.retained import RetainedSet

torch.set_num_threads(1)

DRAWS, HEADS, KV_HEADS, DIM, VALUE_DIM, TOKENS, EVENT = 5, 6, 2, 40, 24, 63, 40
FIRST = 40  # of the steps with gradients


def make_gradients(**changes: Any) -> Gradients:
    plain = Gradients(draws=DRAWS, block=23, at="continuation", targets=(FIRST, TOKENS), steps=TOKENS - FIRST, seed=1)
    return dataclasses.replace(plain, **changes)


def make_layer(
    number: int = 0,
    *,
    first: int = FIRST,
    dtype: torch.dtype = torch.float64,
    gradients: Gradients | None = None,
    scale: float = 0.15,
    **options: Any,
) -> Layer:
    g = torch.Generator().manual_seed(number)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    return Layer.from_arrays(
        2.0 * normal(HEADS, TOKENS - 7, DIM),
        normal(KV_HEADS, TOKENS, DIM),
        normal(KV_HEADS, TOKENS, VALUE_DIM),
        prompt_length=EVENT,
        scale=scale,
        layer=number,
        query_steps=torch.arange(7, TOKENS),
        dtype=dtype,
        output_gradients=0.3 * normal(DRAWS, HEADS, TOKENS - first, VALUE_DIM),
        gradient_steps=torch.arange(first, TOKENS),
        gradients=gradients or make_gradients(),
        **options,
    )


def evicting(seed: int, step: int = EVENT, count: int = 25) -> RetainedSet:
    g = torch.Generator().manual_seed(seed)
    evict = torch.full((KV_HEADS, TOKENS), TOKENS, dtype=torch.int32)
    for head in range(KV_HEADS):
        evict[head, torch.randperm(step, generator=g)[:count]] = step
    return RetainedSet(evict)


def weights_of(layer: Layer, head: int, step: int, rows: list[int]) -> list[float]:
    geometry = layer.geometry
    query = layer.queries[head, int((layer.query_steps == step).nonzero())]
    logits = [geometry.scale * float(query @ layer.keys[head // geometry.group, i]) for i in rows]
    if geometry.softcap is not None:
        logits = [geometry.softcap * math.tanh(z / geometry.softcap) for z in logits]
    total = math.fsum(math.exp(z) for z in logits)
    if geometry.sink_logits is not None:
        total += math.exp(float(geometry.sink_logits[head]))
    return [math.exp(z) / total for z in logits]


def delta_of(layer: Layer, cell: RetainedSet, head: int, step: int) -> Tensor:
    """f_R - f_V [Dv], token by token."""
    first = int(layer.geometry.first_visible(torch.tensor(step)))
    kv_head = head // layer.geometry.group
    visible = list(range(first, step + 1))
    left = [i for i in visible if step < int(cell.evict_step[kv_head, i])]
    delta = torch.zeros(VALUE_DIM, dtype=torch.float64)
    for rows, sign in ((left, 1.0), (visible, -1.0)):
        for weight, row in zip(weights_of(layer, head, step, rows), rows, strict=True):
            delta += sign * weight * layer.values[kv_head, row]
    return delta


def dots_of(layers: list[Layer], cells: list[RetainedSet], event: int) -> dict[tuple[int, int, int, int], float]:
    """g·delta by (draw, layer's place, head, step)."""
    found = {}
    for place, (layer, cell) in enumerate(zip(layers, cells, strict=True)):
        assert layer.output_gradients is not None
        assert layer.gradient_steps is not None
        for at, step in enumerate(layer.gradient_steps.tolist()):
            if step < event:
                continue
            for head in range(HEADS):
                delta = delta_of(layer, cell, head, step)
                for draw in range(DRAWS):
                    found[draw, place, head, step] = float(layer.output_gradients[draw, head, at] @ delta)
    return found


def loop(dots: dict[tuple[int, int, int, int], float], window: int, steps: int) -> list[float]:
    """Per draw: 1/2 · (1/steps) · sum over windows of (sum over steps, layers, heads)^2."""
    first, last = min(k[3] for k in dots), max(k[3] for k in dots)
    values = []
    for draw in range(DRAWS):
        total = 0.0
        for start in range(first, last + 1, window):
            summed = math.fsum(v for k, v in dots.items() if k[0] == draw and start <= k[3] < start + window)
            total += summed * summed
        values.append(total / (2 * steps))
    return values


def partials_of(
    layers: list[Layer], cells: list[RetainedSet], event: int = EVENT, **options: Any
) -> list[dict[str, Tensor]]:
    metric, found = PredictedKL(), []
    for layer, cell in zip(layers, cells, strict=True):
        steps = layer.query_steps[layer.query_steps >= event]
        (errors,) = evaluate_layer(layer, [cell], steps, **options)
        found.append(metric.partial(errors, layer.geometry, cell))
    return found


def three_layers() -> tuple[list[Layer], list[RetainedSet]]:
    layers = [
        make_layer(0),
        make_layer(1, window=20, sink_logits=torch.linspace(-2, 3, HEADS)),
        make_layer(2, softcap=2.5),
    ]
    return layers, [evicting(seed) for seed in range(3)]


def test_every_window_agrees_with_a_loop() -> None:
    layers, cells = three_layers()
    steps = TOKENS - FIRST  # 23: windows of 4 and 32 end in a short one
    found = PredictedKL(windows=(4, 7, steps, 1000)).combine(partials_of(layers, cells, block=5))
    dots = dots_of(layers, cells, EVENT)
    mean = {w: math.fsum(loop(dots, w, steps)) / DRAWS for w in (1, 4, 7, 32, steps, 1000)}
    assert found["predicted_kl"] == pytest.approx(mean[1], rel=1e-11)
    for width in (4, 7, 32, steps, 1000):
        assert found[f"predicted_kl_w{width}"] == pytest.approx(mean[width], rel=1e-11), width
    assert len({mean[1], mean[4], mean[7], mean[steps]}) == 4
    assert (found["predicted_kl_steps"], found["predicted_kl_draws"]) == (steps, DRAWS)


def test_layers_are_summed_before_they_are_squared() -> None:
    """A layer that undoes another leaves nothing."""
    layer, cell = make_layer(0), evicting(0)
    assert layer.output_gradients is not None
    opposite = make_layer(0)
    opposite.output_gradients.neg_()  # type: ignore[union-attr]
    alone = PredictedKL().combine(partials_of([layer], [cell]))["predicted_kl"]
    both = PredictedKL().combine(partials_of([layer, opposite], [cell, cell]))["predicted_kl"]
    twice = PredictedKL().combine(partials_of([layer, make_layer(0)], [cell, cell]))["predicted_kl"]
    assert both == 0.0
    assert alone is not None
    assert alone > 0
    assert twice == pytest.approx(4 * alone, rel=1e-12)


def test_standard_error_and_interval_are_students() -> None:
    layers, cells = three_layers()
    found = PredictedKL().combine(partials_of(layers, cells))
    values = loop(dots_of(layers, cells, EVENT), 1, TOKENS - FIRST)
    mean = math.fsum(values) / DRAWS
    error = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (DRAWS - 1) / DRAWS)
    assert found["predicted_kl_se"] == pytest.approx(error, rel=1e-10)
    assert found["predicted_kl_high"] == pytest.approx(mean + 2.7764451051977987 * error, rel=1e-10)
    assert found["predicted_kl_low"] == pytest.approx(max(0.0, mean - 2.7764451051977987 * error), rel=1e-10)


@pytest.mark.parametrize(
    ("freedom", "expected"),
    [(1, 12.706204736), (2, 4.302652730), (3, 3.182446305), (7, 2.364624252), (30, 2.042272456), (120, 1.979930405)],
)
def test_t_quantiles_are_those_of_the_tables(freedom: int, expected: float) -> None:
    assert two_sided(freedom) == pytest.approx(expected, abs=1e-8)


def test_an_interval_needs_sixteen_windows_and_two_draws() -> None:
    layer, cell = make_layer(0), evicting(0, step=TOKENS - 16)
    enough = PredictedKL().combine(partials_of([layer], [cell], event=TOKENS - 16))
    assert enough["predicted_kl_high"] is not None
    few = PredictedKL().combine(partials_of([layer], [cell], event=TOKENS - 15))
    assert (few["predicted_kl_low"], few["predicted_kl_high"]) == (None, None)
    assert few["predicted_kl_se"] is not None
    (partial,) = partials_of([layer], [cell])
    one = PredictedKL().combine([{**partial, "dot": partial["dot"][:1]}])
    assert one["predicted_kl"] is not None
    assert (one["predicted_kl_se"], one["predicted_kl_low"], one["predicted_kl_high"]) == (None, None, None)


def test_windows_after_the_last_target_do_not_count() -> None:
    """Only an answer's tokens were drawn: no gradient reaches the steps after them."""
    gradients = make_gradients(targets=(FIRST + 5, FIRST + 15), steps=10)
    layer = make_layer(0, gradients=gradients)
    layer.output_gradients[:, :, 15:] = 0.0  # type: ignore[index]
    found = PredictedKL().combine(partials_of([layer], [evicting(0)]))
    assert found["predicted_kl_steps"] == 10
    assert found["predicted_kl_high"] is None
    values = loop(dots_of([layer], [evicting(0)], EVENT), 1, 10)
    assert found["predicted_kl"] == pytest.approx(math.fsum(values) / DRAWS, rel=1e-11)


def test_an_event_after_the_first_gradient_counts_its_own_steps_only() -> None:
    layers, cells = [make_layer(0), make_layer(1)], [evicting(0, step=45), evicting(1, step=45)]
    found = PredictedKL(windows=(4,)).combine(partials_of(layers, cells, event=45))
    dots = dots_of(layers, cells, 45)
    assert found["predicted_kl_steps"] == TOKENS - 45
    assert found["predicted_kl"] == pytest.approx(math.fsum(loop(dots, 1, TOKENS - 45)) / DRAWS, rel=1e-11)
    assert found["predicted_kl_w4"] == pytest.approx(math.fsum(loop(dots, 4, TOKENS - 45)) / DRAWS, rel=1e-11)


def test_an_event_between_the_first_gradient_and_the_first_target_counts_every_target() -> None:
    gradients = make_gradients(targets=(50, TOKENS), steps=TOKENS - 50)
    found = PredictedKL().combine(partials_of([make_layer(0, gradients=gradients)], [evicting(0, 45)], event=45))
    assert found["predicted_kl_steps"] == TOKENS - 50
    later = PredictedKL().combine(partials_of([make_layer(0, gradients=gradients)], [evicting(0, 45)], event=52))
    assert later["predicted_kl_steps"] == TOKENS - 52


def without_queries(layer: Layer, *steps: int) -> Layer:
    """The layer, its queries of these steps taken out."""
    left = ~torch.isin(layer.query_steps, torch.tensor(steps))
    queries = layer.queries[:, left]
    return dataclasses.replace(
        layer, query_steps=layer.query_steps[left], loaders={**layer.loaders, "queries": lambda: queries}
    )


def test_targets_count_from_the_first_step_with_gradient_and_query() -> None:
    """A query before the gradients, and none at the targets: nothing was measured there."""
    gradients = make_gradients(targets=(FIRST, FIRST + 5), steps=5)
    gap = without_queries(make_layer(0, gradients=gradients), *range(FIRST, FIRST + 5))
    found = PredictedKL().combine(partials_of([gap], [evicting(0, 35)], event=35))
    assert {found["predicted_kl"], found["predicted_kl_steps"]} == {None}


def test_layers_with_other_queries_are_added_step_by_step() -> None:
    """Windows and steps are those of all layers together, whichever layer comes first."""
    fewer = without_queries(make_layer(0), *range(FIRST, FIRST + 6), *range(TOKENS - 3, TOKENS))
    layers, cells = [fewer, make_layer(1)], [evicting(0), evicting(1)]
    dots = {
        (draw, place, head, step): value
        for (draw, place, head, step), value in dots_of([make_layer(0), make_layer(1)], cells, EVENT).items()
        if place == 1 or FIRST + 6 <= step < TOKENS - 3
    }
    for order in (1, -1):
        found = PredictedKL(windows=(4,)).combine(partials_of(layers[::order], cells[::order]))
        assert found["predicted_kl_steps"] == TOKENS - FIRST
        for window, column in ((1, "predicted_kl"), (4, "predicted_kl_w4"), (32, "predicted_kl_w32")):
            expected = math.fsum(loop(dots, window, TOKENS - FIRST)) / DRAWS
            assert found[column] == pytest.approx(expected, rel=1e-11), column


@pytest.mark.parametrize("width", [TOKENS - FIRST, TOKENS - FIRST + 1, 10**12])
def test_a_window_wider_than_everything_is_one_window(width: int) -> None:
    whole = Whole.of(partials_of([make_layer(0)], [evicting(0)]))
    assert whole is not None
    expected = whole.dot.sum(1).square() / (2 * (TOKENS - FIRST))
    torch.testing.assert_close(whole.per_draw(width), expected, rtol=1e-12, atol=0)
    assert whole.windows(width) == 1


def test_windows_start_at_the_first_step_with_a_gradient() -> None:
    """An event before it: the steps in between are evaluated by every other metric, and by this one left out."""
    layers, cells = [make_layer(0), make_layer(1)], [evicting(0, step=30), evicting(1, step=30)]
    partials = partials_of(layers, cells, event=30)
    assert partials[0]["steps"].tolist() == list(range(FIRST, TOKENS))
    found = PredictedKL(windows=(4,)).combine(partials)
    values = loop(dots_of(layers, cells, 30), 4, TOKENS - FIRST)
    assert found["predicted_kl_w4"] == pytest.approx(math.fsum(values) / DRAWS, rel=1e-11)


def test_shares_of_heads_add_up_to_the_total_and_may_be_negative() -> None:
    layers, cells = three_layers()
    partials = partials_of(layers, cells)
    shares = PredictedKL().shares(partials)["predicted_kl_share"]
    dots, steps = dots_of(layers, cells, EVENT), TOKENS - FIRST
    for place in range(3):
        for head in range(HEADS):
            total = 0.0
            for draw in range(DRAWS):
                for step in range(FIRST, TOKENS):
                    whole = math.fsum(v for k, v in dots.items() if (k[0], k[3]) == (draw, step))
                    total += dots[draw, place, head, step] * whole
            assert float(shares[place][head]) == pytest.approx(total / (2 * steps * DRAWS), rel=1e-10, abs=1e-15)
    summed = math.fsum(float(value) for heads in shares for value in heads)
    assert summed == pytest.approx(PredictedKL().combine(partials)["predicted_kl"], rel=1e-12)
    opposite = make_layer(0)
    opposite.output_gradients.mul_(-0.5)  # type: ignore[union-attr]
    against = PredictedKL().shares(partials_of([layers[0], opposite], [cells[0]] * 2))["predicted_kl_share"]
    torch.testing.assert_close(against[1], -0.5 * against[0], rtol=1e-12, atol=0)
    assert float(against[1].sum()) < 0


def test_token_shares_are_the_split_of_delta_and_add_up_to_the_layers() -> None:
    layers, cells = three_layers()
    partials = partials_of(layers, cells)
    whole = Whole.of(partials)
    assert whole is not None
    shares = PredictedKL().shares(partials)["predicted_kl_share"]
    for place, (layer, cell) in enumerate(zip(layers, cells, strict=True)):
        found = token_shares(layer, cell.evict_step, whole, EVENT)
        assert found.shape == (KV_HEADS, TOKENS)
        assert bool((found[cell.evict_step == TOKENS] == 0).all())
        by_group = shares[place].view(KV_HEADS, -1).sum(1)
        torch.testing.assert_close(found.sum(1), by_group, rtol=1e-10, atol=1e-14)
    layer, cell = layers[1], cells[1]  # sink logits and a window: some tokens left it before the end
    expected = torch.zeros(KV_HEADS, TOKENS, dtype=torch.float64)
    for at, step in enumerate(range(FIRST, TOKENS)):
        visible = list(range(step - 19, step + 1))
        for head in range(HEADS):
            kv_head = head // 3
            weights = dict(zip(visible, weights_of(layer, head, step, visible), strict=True))
            lost = [i for i in visible if step >= int(cell.evict_step[kv_head, i])]
            mass = math.fsum(weights[i] for i in lost)
            full = sum(weights[i] * layer.values[kv_head, i] for i in visible)
            for draw in range(DRAWS):
                factor = float(whole.dot[draw, at]) / (2 * (TOKENS - FIRST) * DRAWS)
                for i in lost:
                    part = weights[i] / (1 - mass) * (full - layer.values[kv_head, i])
                    expected[kv_head, i] += factor * float(layer.output_gradients[draw, head, at] @ part)  # type: ignore[index]
    torch.testing.assert_close(token_shares(layer, cell.evict_step, whole, EVENT), expected, rtol=1e-9, atol=1e-15)


def test_token_shares_add_up_where_a_step_keeps_nothing_and_where_it_keeps_little() -> None:
    everything = RetainedSet(torch.full((KV_HEADS, TOKENS), EVENT, dtype=torch.int32))
    own = RetainedSet(everything.evict_step.clone())
    own.evict_step[:, EVENT:] = TOKENS
    for layer, cell in (
        (make_layer(0), everything),
        (make_layer(1, sink_logits=torch.linspace(-2, 3, HEADS)), everything),
        (make_layer(2, scale=0.25), own),
    ):
        partials = partials_of([layer], [cell])
        whole = Whole.of(partials)
        assert whole is not None
        shares = PredictedKL().shares(partials)["predicted_kl_share"][0].view(KV_HEADS, -1).sum(1)
        found = token_shares(layer, cell.evict_step, whole, EVENT)
        assert bool(torch.isfinite(found).all())
        torch.testing.assert_close(found.sum(1), shares, rtol=1e-9, atol=1e-12)
    (errors,) = evaluate_layer(make_layer(2, scale=0.25), [own], torch.arange(EVENT, TOKENS))
    assert float((1 - errors.mass).min()) < 1e-4  # so much was lost


def test_float32_is_close_and_stored_in_float32() -> None:
    cells = [evicting(0), evicting(1)]
    single, double = ([make_layer(n, dtype=d) for n in range(2)] for d in (torch.float32, torch.float64))
    partials = partials_of(single, cells)
    assert partials[0]["dot"].dtype == torch.float32
    found, exact = (PredictedKL().combine(p) for p in (partials, partials_of(double, cells)))
    assert found["predicted_kl"] == pytest.approx(exact["predicted_kl"], rel=1e-5)


def test_nothing_evicted_predicts_exactly_nothing() -> None:
    layers = [make_layer(0), make_layer(1)]
    found = PredictedKL().combine(partials_of(layers, [RetainedSet.keep_all(KV_HEADS, TOKENS)] * 2))
    assert (found["predicted_kl"], found["predicted_kl_se"], found["predicted_kl_high"]) == (0.0, 0.0, 0.0)


def test_null_without_gradients_in_a_pool_and_where_none_is_left() -> None:
    bare = Layer.from_arrays(
        *(torch.randn(2, 9, 8) for _ in range(3)),
        prompt_length=5,
        scale=1.0,
    )
    cell = RetainedSet(torch.full((2, 9), 9, dtype=torch.int32))
    partials = partials_of([bare], [cell], event=5)
    assert set(PredictedKL(windows=(4,)).combine(partials).values()) == {None}
    assert bool(PredictedKL().shares(partials)["predicted_kl_share"][0].isnan().all())
    assert Whole.of(partials) is None
    early = make_layer(0, first=20, gradients=make_gradients(targets=(20, 30), steps=10, at="prompt"))
    assert PredictedKL().combine(partials_of([early], [evicting(0)]))["predicted_kl"] is None


def test_a_layer_without_gradients_beside_others_has_no_share() -> None:
    layers, cells = [make_layer(0), make_layer(1)], [evicting(0), evicting(1)]
    partials = partials_of(layers, cells)
    partials[1] |= {"dot": torch.zeros(0, HEADS, 0), "steps": partials[1]["steps"][:0]}
    alone = PredictedKL().combine(partials[:1])
    assert PredictedKL().combine(partials) == alone
    shares = PredictedKL().shares(partials)["predicted_kl_share"]
    assert float(shares[0].sum()) == pytest.approx(alone["predicted_kl"], rel=1e-12)
    assert bool(shares[1].isnan().all())


def test_a_gradient_that_is_no_number_is_an_error() -> None:
    layer = make_layer(0)
    layer.output_gradients[1, 2, 3, 4] = float("inf")  # type: ignore[index]
    with pytest.raises(KvtoolError) as caught:
        partials_of([layer], [evicting(0)])
    assert caught.value.code == "not-finite"


@pytest.mark.parametrize("number", [1e38, -3e38])
def test_gradients_whose_product_overflows_are_an_error_that_names_the_layer(number: float) -> None:
    layers = [make_layer(n, dtype=torch.float32) for n in (0, 7)]
    layers[1].output_gradients[3, 2] = number  # type: ignore[index]
    with pytest.raises(KvtoolError, match=r"gradients of layer 7 times errors of attention .* float32") as caught:
        partials_of(layers, [evicting(0), evicting(1)])
    assert caught.value.code == "not-finite"
    exact = [layer.with_dtype(torch.float64) for layer in layers]
    exact[1].output_gradients[3, 2] = number  # type: ignore[index]
    found = PredictedKL().combine(partials_of(exact, [evicting(0), evicting(1)]))
    assert found["predicted_kl"] is not None
    assert math.isfinite(found["predicted_kl"])


def test_an_interval_ends_at_zero() -> None:
    """Two draws of which one says nearly nothing: Student's t reaches far below 0."""
    (partial,) = partials_of([make_layer(0)], [evicting(0)])
    dot = partial["dot"][:2].clone()
    dot[1] *= 1e-3
    found = PredictedKL().combine([{**partial, "dot": dot}])
    assert found["predicted_kl"] - 12.7 * found["predicted_kl_se"] < 0  # type: ignore[operator]
    assert found["predicted_kl_low"] == 0.0
    assert found["predicted_kl_high"] > found["predicted_kl"]  # type: ignore[operator]


def test_a_mean_counts_only_sequences_that_have_a_prediction_and_the_fewest_draws() -> None:
    (partial,) = partials_of([make_layer(0)], [evicting(0)])
    many = PredictedKL().combine([partial])
    few = PredictedKL().combine([{**partial, "dot": partial["dot"][:3]}])
    nothing = dict.fromkeys(many)
    mean = PredictedKL().average([many, nothing, few])
    assert mean["predicted_kl_draws"] == 3
    error = math.hypot(many["predicted_kl_se"], few["predicted_kl_se"]) / 2  # type: ignore[arg-type]
    assert mean["predicted_kl_se"] == pytest.approx(error, rel=1e-14)
    middle = (many["predicted_kl"] + few["predicted_kl"]) / 2  # type: ignore[operator]
    assert mean["predicted_kl_high"] == pytest.approx(middle + two_sided(2) * error, rel=1e-12)


def test_token_shares_of_a_late_event_leave_earlier_steps_alone() -> None:
    layer, cell = make_layer(0), evicting(0, step=TOKENS - 2)
    partials = partials_of([layer], [cell], event=TOKENS - 2)
    whole = Whole.of(partials)
    assert whole is not None
    found = token_shares(layer, cell.evict_step, whole, TOKENS - 2)
    by_group = PredictedKL().shares(partials)["predicted_kl_share"][0].view(KV_HEADS, -1).sum(1)
    torch.testing.assert_close(found.sum(1), by_group, rtol=1e-10, atol=1e-14)
    assert float(found.abs().max()) > 0


def test_mean_over_sequences_adds_variances() -> None:
    layers, cells = three_layers()
    of_each = [PredictedKL().combine(partials_of([layer], [cell])) for layer, cell in zip(layers, cells, strict=True)]
    mean = PredictedKL().average(of_each)
    values, errors = ([cell[name] or 0.0 for cell in of_each] for name in ("predicted_kl", "predicted_kl_se"))
    assert mean["predicted_kl"] == pytest.approx(sum(values) / 3, rel=1e-14)
    error = math.sqrt(sum(e * e for e in errors)) / 3
    assert mean["predicted_kl_se"] == pytest.approx(error, rel=1e-14)
    assert mean["predicted_kl_high"] == pytest.approx(sum(values) / 3 + two_sided(DRAWS - 1) * error, rel=1e-12)
    assert (mean["predicted_kl_draws"], mean["predicted_kl_steps"]) == (DRAWS, 3 * (TOKENS - FIRST))
    assert PredictedKL().average(of_each[:1]) == pytest.approx(of_each[0])
    nothing = dict.fromkeys(of_each[0])
    assert set(PredictedKL().average([nothing, nothing]).values()) == {None}
    assert PredictedKL().average([of_each[0], nothing])["predicted_kl"] == of_each[0]["predicted_kl"]


VOCABULARY, LENGTH = 11, 12


def toy() -> tuple[Tensor, Tensor, Tensor]:
    """Logits linear in the outputs of 2 layers with 2 heads each, causal: mixing [t', t, L·H, Dv, V], the
    full-cache log-probabilities [t', V], and a change of the outputs delta [t, L·H, Dv]."""
    g = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    mixing = 0.4 * normal(LENGTH, LENGTH, 4, 3, VOCABULARY)
    mixing *= torch.ones(LENGTH, LENGTH).tril()[:, :, None, None, None]
    outputs = normal(LENGTH, 4, 3)
    return mixing, torch.einsum("pthdv,thd->pv", mixing, outputs).log_softmax(-1), 0.3 * normal(LENGTH, 4, 3)


def toy_dots(draws: int, seed: int) -> Tensor:
    """[S, L·H, T] g·delta, y drawn at every step, g = d/df(t) of the sum of log p(y)."""
    mixing, log_p, delta = toy()
    p = log_p.exp()
    y = torch.multinomial(p, draws, replacement=True, generator=torch.Generator().manual_seed(seed)).T  # [S, T]
    residual = torch.nn.functional.one_hot(y, VOCABULARY).to(torch.float64) - p  # [S, t', V]
    by_target = torch.einsum("pthdv,thd->pthv", mixing, delta)  # what delta at t does to the logits of t'
    return torch.einsum("pthv,spv->sht", by_target, residual)


def toy_partials(dots: Tensor) -> list[dict[str, Tensor]]:
    shared = {"steps": torch.arange(LENGTH), "drawn_steps": torch.tensor(LENGTH), "last_target": torch.tensor(99)}
    return [{"dot": dots[:, :2], **shared}, {"dot": dots[:, 2:], **shared}]


def toy_form(window: int) -> float:
    """1/2 · (1/T) · sum over windows of sum over t' of Var under p(t') of what the window's steps do to its logits,
    by Jacobians written out step by step."""
    mixing, log_p, delta = toy()
    total = 0.0
    for start in range(0, LENGTH, window):
        inside = range(start, min(start + window, LENGTH))
        for target in range(LENGTH):
            moved = torch.zeros(VOCABULARY, dtype=torch.float64)
            for step in inside:
                for head in range(4):
                    moved += delta[step, head] @ mixing[target, step, head]
            p = log_p[target].exp()
            fisher = torch.diag(p) - torch.outer(p, p)
            total += float(moved @ fisher @ moved)
    return total / (2 * LENGTH)


@pytest.mark.parametrize("window", [1, 4, 5, LENGTH])
def test_many_draws_converge_to_the_exact_quadratic_form(window: int) -> None:
    exact = toy_form(window)
    column = "predicted_kl" if window == 1 else f"predicted_kl_w{window}"

    def estimate(draws: int, seed: int) -> float:
        value = PredictedKL(windows=(window,)).combine(toy_partials(toy_dots(draws, seed)))[column]
        assert value is not None
        return float(value)

    spreads = {}
    for draws in (16, 256, 4096):
        errors = [estimate(draws, seed) / exact - 1 for seed in range(40)]
        spreads[draws] = math.sqrt(sum(e * e for e in errors) / len(errors))
        bias = sum(errors) / len(errors)
        assert abs(bias) < 4 * spreads[draws] / math.sqrt(len(errors)), draws
    assert spreads[4096] < 0.05
    assert 2.5 < spreads[16] / spreads[256] < 6.5  # 4 where errors fall like one over the root of S
    assert 2.5 < spreads[256] / spreads[4096] < 6.5


def test_the_whole_text_as_one_window_is_the_second_order_term_of_kl() -> None:
    """KL itself, exactly computed, over the form: the ratio goes to 1 as the change goes to 0."""
    mixing, log_p, delta = toy()
    form, gaps = toy_form(LENGTH), []
    for scale in (0.1, 0.01, 0.001):
        moved = torch.einsum("pthdv,thd->pv", mixing, scale * delta)
        log_q = (log_p + moved).log_softmax(-1)
        kl = float((log_p.exp() * (log_p - log_q)).sum()) / LENGTH
        gaps.append(abs(kl / (scale**2 * form) - 1))
    assert gaps[1] < 0.2 * gaps[0]
    assert gaps[2] < 1e-3
