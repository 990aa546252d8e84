"""Conformance checks for metrics.

Everything that replay relies on is tried on small synthetic layers: declared columns and their shapes, NaN and zero
outputs, determinism, storing, single steps, no event and several, layers without projection or gradients, caches that
lose nothing or almost everything.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvtool.errors import KvtoolError
from kvtool.example_layer import example_layer
from kvtool.layer import Layer
from kvtool.metrics import Asked, Metric, StepErrors
from kvtool.metrics.declared import built_in, fault_of
from kvtool.metrics.metric import Number
from kvtool.metrics.trial import measured, one_event, then
from kvtool.retained import RetainedSet

FIRST = 16  # the first evaluated step of every case
Partial = dict[str, Tensor]


def check_metric(metric: Metric | type[Metric], *, full: Mapping[str, float] | None = None) -> None:
    """Raise AssertionError with one clear sentence at the first rule the metric breaks.

    Args:
        metric: an instance, or a class whose parameters all have defaults.
        full: column -> what it is where nothing was evicted, for columns of which that is known; undefined is
            accepted too.
    """
    name = metric.__name__ if isinstance(metric, type) else type(metric).__name__
    made = metric() if isinstance(metric, type) else metric
    _check_declaration(name, made, full or {})
    asked = Asked(metric=made, label=name)
    for case, layer in _layers():
        kept = RetainedSet.keep_all(layer.geometry.kv_heads, layer.tokens)
        for what, retained in _sets(layer):
            with _named(name, f"{case}, {what}"):
                errors, nothing_lost = measured(layer, [retained, kept], FIRST)
                found = _check_partial(asked, errors, layer, retained)
                whole = asked.partial(nothing_lost, layer.geometry, kept)
                _check_full(asked, whole, full or {})
                _check_cells(asked, [found, whole])
    with _named(name, "three layers"):
        _check_cells(asked, [_half_evicted(asked, layer) for layer in _model()])


def _check_declaration(name: str, metric: Any, full: Mapping[str, float]) -> None:
    assert isinstance(metric, Metric), f"{name} is not a subclass of kvtool.metrics.Metric"
    frozen = getattr(getattr(type(metric), "__dataclass_params__", None), "frozen", False)
    assert frozen, f"{name} is not a frozen dataclass"
    assert "__dataclass_fields__" in vars(type(metric)), f"{name} lacks @dataclass(frozen=True) of its own"
    fault = fault_of(metric, built_in=built_in(metric))
    assert fault is None, f"{name} {fault}"
    unknown = sorted(set(full) - {column.name for column in metric.columns})
    assert not unknown, f"{name} has no column {unknown[0]}, of which `full` speaks"


@contextlib.contextmanager
def _named(name: str, case: str) -> Iterator[None]:
    """What goes wrong inside is said of the metric, and where."""
    try:
        yield
    except KvtoolError as error:
        what = error.message.removeprefix(f"metric {name} ")
        raise AssertionError(f"{name} {what} ({case})") from error
    except AssertionError as error:
        raise AssertionError(f"{name} {error} ({case})") from None


def _layers() -> Iterator[tuple[str, Layer]]:
    """(what it is, layer of 24 or more rows)."""
    yield "grouped heads", example_layer(24, seed=1)
    yield "one KV head", example_layer(24, seed=2, query_heads=3, kv_heads=1)
    yield "one query head per KV head", example_layer(24, seed=3, query_heads=3, kv_heads=3)
    yield "a sliding window", example_layer(40, seed=4, kind="sliding", window=12)
    yield "chunked attention", example_layer(40, seed=5, kind="chunked", window=12)
    yield "sink logits", example_layer(24, seed=6, sinks=True)
    yield "bfloat16 data", example_layer(24, seed=7, stored=torch.bfloat16)
    yield "float64 arithmetic", example_layer(24, seed=8, dtype=torch.float64)
    yield "a single evaluated step", example_layer(FIRST + 1, seed=9)
    bare = example_layer(24, seed=10)
    yield "no output projection and no gradients", _without(bare)
    silent = example_layer(24, seed=11)
    zero = torch.zeros_like(silent.values)
    yield "outputs that are zero", dataclasses.replace(silent, loaders={**silent.loaders, "values": lambda: zero})


def _model() -> list[Layer]:
    """Layers that one model may have side by side."""
    other = {"query_heads": 3, "kv_heads": 1}
    window = example_layer(24, seed=22, kind="sliding", window=12)
    return [example_layer(24, seed=21), window, example_layer(24, seed=23, **other)]  # type: ignore[arg-type]


def _half_evicted(asked: Asked, layer: Layer) -> Partial:
    retained = one_event(layer, FIRST, 8, seed=3)
    (errors,) = measured(layer, [retained], FIRST)
    return asked.partial(errors, layer.geometry, retained)


def _without(layer: Layer) -> Layer:
    loaders = {n: load for n, load in layer.loaders.items() if n not in ("output_projection", "output_gradients")}
    return dataclasses.replace(layer, loaders=loaders, gradients=None, gradient_steps=None)


def _sets(layer: Layer) -> Iterator[tuple[str, RetainedSet]]:
    """(what it is, retained set)."""
    heads, tokens = layer.geometry.kv_heads, layer.tokens
    yield "nothing evicted and no event", RetainedSet.keep_all(heads, tokens)
    yield "an event that keeps all", one_event(layer, FIRST, tokens)
    yield "half evicted", one_event(layer, FIRST, 8, seed=1)
    yield "one token kept", one_event(layer, FIRST, 1, seed=2)
    if tokens >= 24:
        first, second = (one_event(layer, step, 6, seed=step, several=True) for step in (FIRST, 20))
        yield "two events", then(first, second)


def _check_partial(asked: Asked, errors: StepErrors, layer: Layer, retained: RetainedSet) -> Partial:
    found = asked.partial(errors, layer.geometry, retained)
    _check_equal(found, asked.partial(errors, layer.geometry, retained), "gives other numbers when it is asked again")
    bare = dataclasses.replace(errors, future_mass=None)
    asked.partial(bare, layer.geometry, retained)  # as replay does under several events
    for stop in (FIRST + 1, layer.tokens):  # the steps from one event to the next: at least one
        asked.partial(errors.between(FIRST, stop), layer.geometry, retained)
    _check_equal(found, asked.partial(errors, layer.geometry, retained), "remembers what it was asked before")
    return found


def _check_full(asked: Asked, found: Partial, full: Mapping[str, float]) -> None:
    cells = asked.combine([found])
    for name, wanted in full.items():
        values = [v for v in found[name].reshape(-1).tolist() if v == v] if name in found else []
        values += [v for v in (cells.get(name),) if v is not None]
        wrong = next((value for value in values if value != wanted), None)
        assert wrong is None, f"gives {name} = {wrong} where nothing was evicted, not {wanted}"


def _check_cells(asked: Asked, partials: list[Partial]) -> None:
    """Put together from what was stored, in any order of layers; the mean over one sequence is its own."""
    whole = asked.combine(partials)
    _check_numbers(whole, asked.combine(_stored(partials)), "combines otherwise what was stored and read back")
    _check_numbers(whole, asked.combine(partials[::-1]), "combines otherwise in another order of layers", 1e-9)
    _check_numbers(whole, asked.average([whole]), "averages one sequence to something else than its own numbers", 1e-12)
    other = asked.combine(partials[:1])
    both = asked.average([whole, other])
    _check_numbers(both, asked.average([other, whole]), "averages otherwise in another order of sequences", 1e-9)
    undefined: dict[str, Number] = dict.fromkeys(whole)
    asked.average([whole, undefined])
    heads = {name: [p[name] for p in partials] for name in asked.names("head")}
    for name, layers in asked.shares(partials).items():
        expected = [tuple(of.shape) for of in next(iter(heads.values()), [])]
        given = [tuple(of.shape) for of in layers]
        assert not expected or given == expected, f"shares out {name} as {given}, expected {expected}"


def _stored(partials: list[Partial]) -> list[Partial]:
    """The same partials after a round through a file."""
    found = []
    for partial in partials:
        buffer = io.BytesIO()
        np.savez(buffer, **{f"0/{name}": value.numpy() for name, value in partial.items()})  # type: ignore[arg-type]
        buffer.seek(0)
        with np.load(buffer, allow_pickle=False) as archive:
            found.append({name[2:]: torch.from_numpy(archive[name]) for name in archive.files})
    return found


def _check_equal(one: Partial, other: Partial, what: str) -> None:
    assert one.keys() == other.keys(), what
    for name, value in one.items():
        assert (value.shape, value.dtype) == (other[name].shape, other[name].dtype), f"{what}: {name}"
        same = torch.equal(value.isnan(), other[name].isnan()) and torch.equal(
            value.nan_to_num(), other[name].nan_to_num()
        )
        assert same, f"{what}: {name}"


def _check_numbers(one: dict[str, Number], other: dict[str, Number], what: str, tolerance: float = 0.0) -> None:
    for name, value in one.items():
        again = other[name]
        if value is None or again is None:
            assert value is again, f"{what}: {name} is {value} and {again}"
        else:
            close = math.isclose(value, again, rel_tol=tolerance, abs_tol=tolerance * 1e-3)
            assert close or value == again, f"{what}: {name} is {value} and {again}"
