"""Error norms where float32 runs out: tiny outputs beside a sink, vectors of unequal length, tiny values, overflow."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kvtool.errors import KvtoolError
from kvtool.kernels.retained_attention.errors import CellErrors, cell_errors
from kvtool.metrics.step_errors import from_norms

torch.set_num_threads(1)
QUERIES = 20


def same_query(logits: Tensor, values: Tensor, evicted: Tensor, sink: float | None = None) -> CellErrors:
    """One query, repeated, of the given logits [n] over values [n, Dv], and one cell that evicts `evicted` [n] bool."""
    tokens = len(logits)
    values = torch.nn.functional.pad(values, (0, 40 - values.shape[1]))  # long rows are summed in another way
    return cell_errors(
        torch.ones(1, QUERIES, 1),
        logits.float()[None, :, None],
        values.float()[None],
        torch.where(evicted, tokens, tokens + QUERIES)[None, None],
        steps=torch.arange(tokens, tokens + QUERIES),
        rows=torch.arange(tokens),
        first_visible=torch.zeros(QUERIES, dtype=torch.int64),
        scale=1.0,
        sink_logits=None if sink is None else torch.tensor([sink]),
    )


@pytest.mark.parametrize("gap", [30.0, 46.0, 60.0, 80.0])
def test_an_output_that_a_sink_leaves_tiny_keeps_its_length(gap: float) -> None:
    found = same_query(torch.zeros(2), torch.tensor([[3.0, 0.0], [0.0, 4.0]]), torch.tensor([False, True]), sink=gap)

    assert float(found.squared_output.sqrt().max()) == pytest.approx(5 * math.exp(-gap), rel=1e-4, abs=0)
    assert float(found.squared_error.sqrt().max()) == pytest.approx(4 * math.exp(-gap), rel=1e-4, abs=0)
    assert float(found.cosine.max()) == pytest.approx(0.4, rel=1e-4, abs=0)  # (3, 4) and (3, 0)


def test_tiny_weights_of_the_only_values_that_are_not_zero() -> None:
    values = torch.tensor([[0.0, 0.0], [3.0, 4.0], [0.0, 5.0]])
    found = same_query(torch.tensor([0.0, -55.0, -55.0]), values, torch.tensor([False, False, True]))

    tiny = math.exp(-55)
    assert float(found.squared_output.sqrt().max()) == pytest.approx(math.hypot(3, 9) * tiny, rel=1e-4, abs=0)
    assert float(found.cosine.max()) == pytest.approx(1 - (9 + 36) / (5 * math.hypot(3, 9)), rel=1e-4, abs=0)


@pytest.mark.parametrize("size", [1e2, 1e6, 1e9])
def test_angle_between_vectors_of_very_unequal_length(size: float) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        values, logits = torch.randn(9, 40, generator=generator), torch.randn(9, generator=generator)
        lost = torch.arange(9) < 4
        values[lost] *= size
        found = same_query(logits, values, lost)

        f_v, f_r = (logits[some].double().softmax(0) @ values[some].double() for some in (lost | True, ~lost))
        expected = 1 - float(f_v @ f_r / f_v.norm() / f_r.norm())
        assert float(found.cosine.max()) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("gap", [64.0, 66.0, 68.0])
@pytest.mark.parametrize("lost_is_far", [True, False])
def test_tiny_values_with_tiny_weights_keep_their_digits(gap: float, lost_is_far: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(100, 40, generator=generator).mul(1e-12).float()
    logits = torch.randn(100, generator=generator).float()
    far = torch.arange(100) < 50
    logits[far] -= gap
    found = same_query(logits, values, far if lost_is_far else ~far)

    def mean(chosen: Tensor) -> Tensor:
        return logits[chosen].double().softmax(0) @ values[chosen].double()

    expected = float((mean(far) - mean(~far)).norm())
    assert float(found.gap.max()) == pytest.approx(expected, rel=2e-6, abs=0)


def test_an_error_that_is_tiny_because_all_is_lost() -> None:
    values = torch.tensor([[0.0, 0.0], [3.0, 4.0]])
    found = same_query(torch.tensor([0.0, -55.0]), values, torch.tensor([True, True]))

    assert float(found.squared_error.sqrt().max()) == pytest.approx(5 * math.exp(-55), rel=1e-4, abs=0)


@pytest.mark.parametrize("which", ["all", "errors"])
def test_logits_that_overflow_are_not_taken_for_an_output_of_zero(which: str) -> None:
    queries, keys = torch.full((1, 2, 2), 1e20), torch.full((1, 3, 2), 1e20)
    found = cell_errors(
        queries,
        keys,
        torch.ones(1, 3, 2),
        torch.tensor([[[3, 9, 9]]]),
        steps=torch.tensor([3, 4]),
        rows=torch.arange(3),
        first_visible=torch.zeros(2, dtype=torch.int64),
        scale=1.0,
        which=which,  # type: ignore[arg-type]
    )

    assert bool(found.squared_output.isnan().all())
    with pytest.raises(KvtoolError) as refused:
        from_norms(found, torch.tensor([3, 4]), layer=5)
    assert refused.value.code == "not-finite"


def test_steps_that_never_come_need_no_memory() -> None:
    evict = torch.tensor([[[0, 1 << 62, 1 << 62]], [[-(1 << 62), 0, 1 << 62]]])
    found = cell_errors(
        torch.zeros(1, 2, 1),
        torch.zeros(1, 3, 1),
        torch.tensor([[[1.0], [2.0], [6.0]]]),
        evict,
        steps=torch.tensor([3, 4]),
        rows=torch.arange(3),
        first_visible=torch.zeros(2, dtype=torch.int64),
        scale=1.0,
    )

    expected = torch.tensor([[1.0, 1.0], [3.0, 3.0]], dtype=torch.float64)  # |3 - 4| and |3 - 6|
    torch.testing.assert_close(found.squared_error[:, 0].sqrt(), expected)
