"""Terms in nats where gradients cover only some of the evaluated steps."""

from __future__ import annotations

import pytest
import torch

from kvtool.decomposition.nats import HeadGradients, undefined
from kvtool.decomposition.output_space import TERMS, OutputTerms
from kvtool.layer import Gradients, Layer

DRAWS, HEADS, STEPS, WIDTH = 2, 4, 9, 3


def layer_with(first: int, last: int, targets: tuple[int, int]) -> Layer:
    """Nine queries from row 20 on; gradients at rows first..last-1."""
    g = torch.Generator().manual_seed(0)
    return Layer.from_arrays(
        torch.randn(HEADS, STEPS, 5, generator=g),
        torch.randn(2, 29, 5, generator=g),
        torch.randn(2, 29, WIDTH, generator=g),
        prompt_length=20,
        scale=0.5,
        dtype=torch.float64,
        output_gradients=torch.randn(DRAWS, HEADS, last - first, WIDTH, generator=g),
        gradient_steps=torch.arange(first, last),
        gradients=Gradients(DRAWS, last - first, "continuation", targets, targets[1] - targets[0], 0),
    )


def test_each_step_meets_its_own_gradient_and_the_divisor_counts_drawn_steps():
    layer = layer_with(22, 27, (23, 26))
    g = torch.Generator().manual_seed(1)
    vectors = {name: torch.randn(2, STEPS, WIDTH, generator=g, dtype=torch.float64) for name in TERMS}
    rest = torch.zeros(2, STEPS, WIDTH, dtype=torch.float64)
    total = sum(vectors.values())
    terms = OutputTerms(pool=rest, kept=rest, signal=rest, parts=vectors, unshared=rest, total=total)
    found = HeadGradients.of(layer, torch.arange(20, 29), slice(2, 4))
    assert found is not None
    columns = found.columns(terms)
    for head in range(2):
        expected = 0.0
        for draw in range(DRAWS):
            for row in range(22, 27):
                gradient = layer.output_gradients[draw, 2 + head, row - 22]
                expected += float(gradient @ vectors["taylor"][head, row - 20]) ** 2
        assert float(columns["nats_taylor"][head]) == pytest.approx(expected / (2 * DRAWS * 3), rel=1e-12)
    whole = sum(columns[name] for name in columns if "total" not in name and "signal" not in name)
    assert torch.allclose(columns["nats_total"], whole, rtol=1e-12)
    assert set(columns) == set(undefined(2))


@pytest.mark.parametrize(
    ("gradients", "targets"),
    [((5, 15), (5, 15)), ((20, 29), (0, 10))],
    ids=["none at these steps", "nothing drawn at these steps"],
)
def test_nothing_to_weigh_with_is_none(gradients, targets):
    layer = layer_with(*gradients, targets)
    assert HeadGradients.of(layer, torch.arange(20, 29), slice(0, 2)) is None
