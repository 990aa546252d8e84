"""Conformance checks for eviction policies, built-in or your own.

    from kvtool.testing import check_policy

    def test_my_policy():
        check_policy(MyPolicy)

Every rule that replay relies on is tried on small synthetic layers: shapes and dtypes, NaN,
determinism, causality (the future is perturbed and replaced by NaN), state that leaks between
sequences, grouped heads, tiny caches, windows, sink logits, softcaps, 16-bit data, evicted slots.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from kvtool.errors import KvtoolError
from kvtool.example_layer import example_layer
from kvtool.layer import Layer
from kvtool.policies.policy import Policy, Protection
from kvtool.replay.ask import refined_scores, scores_of
from kvtool.selection import select
from kvtool.view import View

NEEDS = ("prompt-queries", "recent-queries", "rotation", "future-rotation", "output-projection", "prompt-gradients")


def scores_at(policy: Policy, layer: Layer, step: int, steps_ahead: Tensor | None = None) -> Tensor:
    """[Hk, N] scores of one event on an untouched cache, the state built from the start of the sequence.

    Args:
        steps_ahead: evaluated steps for oracles; by default every step from the event on.
    """
    if policy.oracle and steps_ahead is None:
        steps_ahead = torch.arange(step, layer.tokens)
    view = View.at(layer, step, steps_ahead if policy.oracle else None)
    scores, _ = scores_of(type(policy).__name__, policy, layer, view)
    return scores


def check_policy(policy: Policy | type[Policy]) -> None:
    """Raise AssertionError with one clear sentence at the first rule the policy breaks.

    Args:
        policy: an instance, or a class whose parameters all have defaults.
    """
    name = policy.__name__ if isinstance(policy, type) else type(policy).__name__
    made = policy() if isinstance(policy, type) else policy
    _check_declaration(name, made)
    for case, layer, step in _cases():
        try:
            _check_case(made, layer, step)
        except AssertionError as broken:
            raise AssertionError(f"{name} {broken} ({case}, event before row {step})") from None
        except KvtoolError as error:
            raise AssertionError(f"{name}: {error.message} ({case}, event before row {step})") from error
        except (Exception, SystemExit) as error:
            raise AssertionError(
                f"{name} raised {type(error).__name__}: {error} ({case}, event before row {step})"
            ) from error


def _check_declaration(name: str, policy: Policy) -> None:
    assert isinstance(policy, Policy), f"{name} is not a subclass of kvtool.policies.Policy"
    parameters = getattr(type(policy), "__dataclass_params__", None)
    assert getattr(parameters, "frozen", False), f"{name} is not a frozen dataclass"
    assert "__dataclass_fields__" in vars(type(policy)), f"{name} lacks @dataclass(frozen=True) of its own"
    unknown = [need for need in policy.needs if need not in NEEDS]
    assert not unknown, f"{name} declares needs {unknown}; known are {', '.join(NEEDS)}"
    shields = [policy.protection(budget) for budget in (1, 2, 7, 100)]
    for shield in shields:
        assert isinstance(shield, Protection), f"{name}.protection returns {type(shield).__name__}, not Protection"
        assert min(shield.sinks, shield.window) >= 0, f"{name}.protection is negative"
    assert not policy.nested or len(set(shields)) == 1, (
        f"{name}.protection depends on the budget, so its sets are not nested: declare nested = False"
    )


def _cases() -> Iterator[tuple[str, Layer, int]]:
    """(what it is, layer, event step)."""
    yield "grouped heads", example_layer(seed=1), 40
    yield "one query head per KV head", example_layer(seed=2, query_heads=3, kv_heads=3), 40
    yield "one KV head", example_layer(seed=3, query_heads=6, kv_heads=1, key_dim=12), 33
    yield "a cache of one token", example_layer(9, seed=4), 1
    yield "a cache of two tokens", example_layer(9, seed=5), 2
    yield "a cache smaller than any window", example_layer(12, seed=6), 5
    yield "a sliding window", example_layer(seed=7, kind="sliding", window=16), 40
    yield "a sliding window of one", example_layer(seed=8, kind="sliding", window=1), 20
    yield "chunked attention", example_layer(seed=9, kind="chunked", window=16), 40
    yield "sink logits", example_layer(seed=10, sinks=True), 40
    yield "a softcap", example_layer(seed=11, softcap=2.0), 40
    yield "no rotation", example_layer(seed=12, rotation="none"), 40
    yield "interleaved rotation", example_layer(seed=13, rotation="interleaved"), 40
    yield "bfloat16 data", example_layer(seed=14, stored=torch.bfloat16), 40
    yield "float16 data", example_layer(seed=15, stored=torch.float16), 40
    yield "float64 arithmetic", example_layer(seed=16, dtype=torch.float64), 40
    yield "more tokens than the usual window", example_layer(160, seed=17), 150


def _check_case(policy: Policy, layer: Layer, step: int) -> None:
    before = {name: getattr(layer, name).clone() for name in ("queries", "keys", "values")}
    scores = scores_at(policy, layer, step)
    _check_scores(scores, layer, step)
    for array, copy in before.items():
        assert torch.equal(getattr(layer, array), copy), f"changes the {array} it was shown"
    assert torch.equal(scores, scores_at(policy, layer, step)), "gives other scores when it is asked again"
    _check_exact_counts(policy, layer, step, scores)
    if policy.oracle:
        _check_oracle(policy, layer, step)
    else:
        for what, change in (("other numbers", lambda x: x * 3 + 1), ("NaN", lambda x: x * torch.nan)):
            other = _with_future(layer, step, change)
            assert torch.equal(scores, scores_at(policy, other, step)), (
                f"reads the future: its scores change when rows from the event on are replaced by {what}"
            )
    _check_isolation(policy, layer, step, scores)
    if step >= 8 and not policy.oracle:
        _check_split(policy, layer, step, scores)
        _check_second_event(policy, layer, step)


def _check_scores(scores: Any, layer: Layer, step: int) -> None:
    view = View.at(layer, step)
    expected = [*view.tokens.shape]
    assert isinstance(scores, Tensor), f"returns {type(scores).__name__}, not a tensor"
    assert [*scores.shape] == expected, f"returns scores {[*scores.shape]}, expected [Hk, N] = {expected}"
    assert scores.dtype in (torch.float32, torch.float64), f"returns {scores.dtype}: scores are float32 or wider"
    assert scores.dtype.itemsize >= view.dtype.itemsize, f"returns {scores.dtype}, narrower than {view.dtype}"
    assert not bool(scores.isnan().any()), f"gives NaN at KV head {int(scores.isnan().nonzero()[0, 0])}"


def _check_exact_counts(policy: Policy, layer: Layer, step: int, scores: Tensor) -> None:
    view = View.at(layer, step)
    heads, count = view.tokens.shape
    for budget in sorted({min(1, count), (count + 1) // 2, count}):
        shield = policy.protection(budget)
        refined = _refined(policy, layer, step, [budget] * heads, shield)
        if refined is not None:
            _check_scores(refined, layer, step)
            again = _refined(policy, layer, step, [budget] * heads, shield)
            assert again is not None, "refuses when it is asked again"
            assert torch.equal(refined, again), "refines otherwise when it is asked again"
        if policy.nested and refined is not None:
            assert torch.equal(refined, scores), "refines its scores by the budget: declare nested = False"
        chosen = select(
            scores if refined is None else refined,
            view.tokens,
            [budget] * heads,
            sinks=shield.sinks,
            window=shield.window,
            step=step,
        )
        assert chosen.keep.sum(1).tolist() == [budget] * heads, f"does not keep exactly {budget} tokens"


def _refined(policy: Policy, layer: Layer, step: int, allowed: list[int], shield: Protection) -> Tensor | None:
    """[Hk, N] scores at one budget, None where the policy refuses to search that many sets."""
    view = View.at(layer, step, torch.arange(step, layer.tokens) if policy.oracle else None)
    name = type(policy).__name__
    scores, _ = scores_of(name, policy, layer, view)
    before = scores.clone()
    try:
        refined = refined_scores(name, policy, layer, view, scores, allowed, shield)
    except KvtoolError as error:
        if error.code == "usage":
            return None
        raise
    assert torch.equal(scores, before), "changes the scores that refine was given"
    return refined


def _check_oracle(policy: Policy, layer: Layer, step: int) -> None:
    try:
        scores_at(policy, layer, step, torch.arange(0))
    except KvtoolError:
        return
    raise AssertionError("is an oracle but scores a sequence without queries after the event")


def _check_isolation(policy: Policy, layer: Layer, step: int, alone: Tensor) -> None:
    """B after A, A after B and B alone must agree bit for bit."""
    other = example_layer(
        layer.tokens,
        seed=99,
        query_heads=layer.geometry.query_heads,
        kv_heads=layer.geometry.kv_heads,
        key_dim=layer.geometry.key_dim,
    )
    scores_at(policy, other, step)
    assert torch.equal(alone, scores_at(policy, layer, step)), "keeps state from one sequence to the next"
    shared = policy.start(layer.geometry)
    policy.observe(shared, _past(other, 0, step, None))
    ahead = torch.arange(step, layer.tokens) if policy.oracle else None
    state = policy.observe(shared, _past(layer, 0, step, ahead))
    again = policy.score(state, View.at(layer, step, ahead))
    assert torch.equal(alone, again), "changes a state in place: observe must return a new one"


def _check_split(policy: Policy, layer: Layer, step: int, whole: Tensor) -> None:
    """Observing in two runs of steps comes to the same."""
    middle = step // 2
    state = policy.observe(policy.start(layer.geometry), _past(layer, 0, middle, None))
    state = policy.observe(state, _past(layer, middle, step, None))
    split = policy.score(state, View.at(layer, step))
    assert torch.allclose(split, whole, rtol=1e-4, atol=1e-7, equal_nan=True), (
        "scores otherwise when the same steps are observed in two runs"
    )


def _check_second_event(policy: Policy, layer: Layer, step: int) -> None:
    """A cache with gaps; what the first event evicted must not matter whatever its slots hold."""
    first, heads = step - 4, layer.geometry.kv_heads
    rows = torch.arange(step).expand(heads, -1)
    leaves = torch.full_like(rows, layer.tokens)
    leaves[:, 1:first:3] = first
    for head in range(heads):
        leaves[head, 1:first:3] = torch.where(torch.arange(1, first, 3) % 2 == head % 2, first, layer.tokens)
    even = int((leaves == first).sum(1).min())  # every head evicts as many
    for head in range(heads):
        surplus = (leaves[head] == first).nonzero()[even:, 0]
        leaves[head, surplus] = layer.tokens
    state = policy.observe(policy.start(layer.geometry), _past(layer, 0, first, None))
    found = []
    for filler in (None, torch.nan, 6e4):
        cache = layer if filler is None else _with_slots(layer, leaves == first, filler)
        oldest = int(layer.geometry.first_visible(torch.tensor(step)))
        seen = int(layer.geometry.first_visible(torch.tensor(first)))
        alive = [rows[h][(leaves[h] > first) & (rows[h] >= oldest)] for h in range(heads)]
        recent = [rows[h][(leaves[h] > first) & (rows[h] >= seen)] for h in range(heads)]
        if len({len(a) for a in alive}) > 1 or len({len(r) for r in recent}) > 1:
            return  # the window cuts the heads unevenly; this case is about gaps, not about windows
        tokens, live = torch.stack(alive), torch.stack(recent)
        never = torch.full_like(live, layer.tokens)
        later = policy.observe(state, View(cache, step, live, first, never))
        scores = policy.score(later, View(cache, step, tokens, step, torch.full_like(tokens, layer.tokens)))
        assert scores.shape == tokens.shape, f"returns {[*scores.shape]} for candidates {[*tokens.shape]} with gaps"
        assert not bool(scores.isnan().any()), "gives NaN on a cache with gaps"
        found.append(scores)
    assert all(torch.equal(found[0], f) for f in found[1:]), "looks into slots of evicted tokens"


def _past(layer: Layer, start: int, step: int, steps_ahead: Tensor | None) -> View:
    """What `observe` sees of the steps start..step-1 of an untouched cache."""
    oldest = int(layer.geometry.first_visible(torch.tensor(start)))
    rows = torch.arange(oldest, step).expand(layer.geometry.kv_heads, -1)
    return View(layer, step, rows, start, torch.full_like(rows, layer.tokens), steps_ahead)


def _with_future(layer: Layer, step: int, change: Callable[[Tensor], Tensor]) -> Layer:
    """The layer with every array changed from row `step` on."""

    def changed(array: Tensor) -> Tensor:  # rows are the last axis but one
        return torch.cat([array[..., :step, :], change(array[..., step:, :])], dim=-2)

    return _replaced(layer, changed, ("queries", "keys", "values", "output_gradients"))


def _with_slots(layer: Layer, slots: Tensor, filler: float) -> Layer:
    """The layer with keys and values of `slots` [Hk, rows] overwritten."""
    mask = torch.zeros(layer.geometry.kv_heads, layer.tokens, 1, dtype=torch.bool)
    mask[:, : slots.shape[1], 0] = slots
    return _replaced(layer, lambda array: array.masked_fill(mask, filler), ("keys", "values"))


def _replaced(layer: Layer, change: Callable[[Tensor], Tensor], names: tuple[str, ...]) -> Layer:
    def loader(name: str) -> Callable[[], Tensor]:
        array = change(layer.loaders[name]())
        return lambda: array

    return dataclasses.replace(layer, loaders={**layer.loaders, **{name: loader(name) for name in names}})
