"""The causal view: what it shows, and that nothing at or after the event is in reach."""

from __future__ import annotations

import pytest
import torch

from kvtool.errors import KvtoolError
from kvtool.layer import Geometry, Kind, Layer
from kvtool.view import View


def make_layer(tokens: int = 20, kind: Kind = "full", window: int | None = None, first_query: int = 0) -> Layer:
    make = torch.Generator().manual_seed(3)
    return Layer.from_arrays(
        torch.randn(4, tokens - first_query, 8, generator=make),
        torch.randn(2, tokens, 8, generator=make),
        torch.randn(2, tokens, 6, generator=make),
        prompt_length=12,
        scale=0.5,
        kind=kind,
        window=window,
        query_steps=torch.arange(first_query, tokens),
    )


@pytest.mark.parametrize(
    ("kind", "window", "step", "first"),
    [
        ("full", None, 12, 0),
        ("sliding", 5, 12, 8),
        ("sliding", 50, 12, 0),
        ("chunked", 5, 12, 10),
        ("sliding", 1, 9, 9),
    ],
)
def test_candidates_are_what_the_query_of_the_event_sees(kind: Kind, window: int | None, step: int, first: int) -> None:
    layer = make_layer(kind=kind, window=window)
    view = View.at(layer, step)
    assert view.tokens.tolist() == [list(range(first, step))] * 2
    seen = [i for i in range(step) if layer.geometry.first_visible(torch.tensor(step)) <= i]
    assert seen == list(range(first, step))
    assert torch.equal(view.keys, layer.keys[:, first:step])
    assert torch.equal(view.values, layer.values[:, first:step])


def test_scattered_tokens_are_gathered_by_head() -> None:
    layer = make_layer()
    tokens = torch.tensor([[0, 3, 9], [1, 2, 11]])
    view = View(layer, 12, tokens, 12, torch.full_like(tokens, 20))
    assert torch.equal(view.keys[1, 2], layer.keys[1, 11])
    assert torch.equal(view.values[0, 1], layer.values[0, 3])


def test_the_future_is_out_of_reach() -> None:
    view = View.at(make_layer(), 12)
    assert view.queries(10, 12).shape == (4, 2, 8)
    with pytest.raises(KvtoolError, match="ends at its event"):
        view.queries(10, 13)
    with pytest.raises(KvtoolError, match="ends at its event"):
        view.positions(torch.tensor([12]))
    with pytest.raises(KvtoolError, match="oracle = True"):
        _ = view.future
    assert view.next_positions(3).tolist() == [12, 13, 14]


def test_missing_queries_are_named() -> None:
    view = View.at(make_layer(first_query=6), 12)
    assert view.queries(6, 12).shape == (4, 6, 8)
    with pytest.raises(KvtoolError, match="holds 6 of the queries of steps 0 to 11") as caught:
        view.queries(0, 12)
    assert caught.value.code == "trace-lacks"


def test_streams_differ_by_every_part_of_their_name() -> None:
    view = View.at(make_layer(), 12)
    first = view.stream(0, 0).random(4).tolist()
    assert view.stream(0, 0).random(4).tolist() == first
    assert view.stream(1, 0).random(4).tolist() != first
    assert view.stream(0, 1).random(4).tolist() != first
    assert View.at(make_layer(), 13).stream(0, 0).random(4).tolist() != first


def test_uneven_groups_are_refused() -> None:
    with pytest.raises(KvtoolError, match="cannot share"):
        Layer.from_arrays(torch.randn(3, 4, 8), torch.randn(2, 4, 8), torch.randn(2, 4, 8), prompt_length=2, scale=1.0)


def test_group_maps_contiguous_query_heads() -> None:
    geometry = Geometry(0, query_heads=9, kv_heads=3, key_dim=4, value_dim=4, scale=1.0)
    assert geometry.group == 3
