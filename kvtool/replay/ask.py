"""Ask: call a policy, check what it answers, and blame it by name for what goes wrong inside it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kvtool.errors import KvtoolError
from kvtool.layer import Layer
from kvtool.metrics.declared import DIAGNOSED, taken
from kvtool.policies import Policy, Protection
from kvtool.rotation import Rotation
from kvtool.shown import copied, unchanged
from kvtool.view import View


@contextlib.contextmanager
def blaming(label: str, policy: Policy, layer: Layer, view: View) -> Iterator[None]:
    """Errors inside become `policy-broken` of `label`, and so does writing into what the view shows.

    The layer's tensors serve every policy of a run: a change would corrupt the others in silence.
    PyTorch counts in-place changes per storage, which makes the check free.
    """
    geometry, rotation = layer.geometry, layer.geometry.rotation
    tables = (rotation.inv_freq, rotation.cos, rotation.sin) if isinstance(rotation, Rotation) else ()
    shown = [layer.queries, layer.keys, layer.values, layer.positions, layer.query_steps, view.tokens]
    shown += [t for t in (layer.output_projection, geometry.sink_logits, *tables) if t is not None]
    before = [t._version for t in shown]
    rows = [] if built_in(policy) else [view.tokens, view.evict_step]
    kept = copied(rows)
    try:
        yield
    except KvtoolError:
        raise
    except (Exception, SystemExit) as error:
        words = " ".join(str(error).split())
        raise KvtoolError(
            "policy-broken", f"{label} failed at layer {geometry.layer}: {type(error).__name__}: {words}"
        ) from error
    if [t._version for t in shown] != before or not unchanged(rows, kept):
        raise _changed(label, layer)


@contextlib.contextmanager
def sheltering(label: str, policy: Policy, layer: Layer) -> Iterator[None]:
    """Whatever a policy of others does inside to what the layer shows is `policy-broken`, also where PyTorch does
    not count it, as it does not for what NumPy writes. That needs a copy, so it is done once for many calls.
    """
    shown = [] if built_in(policy) else _arrays(layer)
    if "prompt-gradients" in policy.needs and shown:
        shown.append(layer.output_gradients)
    kept = copied(shown)
    yield
    if not unchanged(shown, kept):
        raise _changed(label, layer)


def built_in(policy: Policy) -> bool:
    """Whether `policy` is kvtool's own, which are known to write nowhere."""
    return type(policy).__module__.startswith("kvtool.policies.")


def _arrays(layer: Layer) -> list[Any]:
    """Everything that a view of `layer` may hand out, gradients apart."""
    arrays = [layer.queries, layer.keys, layer.values, layer.positions, layer.query_steps, layer.output_projection]
    return [*arrays, layer.gradient_steps, layer.geometry]


def _changed(label: str, layer: Layer) -> KvtoolError:
    what = f"{label} changed what it was shown at layer {layer.geometry.layer}"
    return KvtoolError("policy-broken", what, "work on a copy")


def scores_of(label: str, policy: Policy, layer: Layer, view: View) -> tuple[Tensor, dict[str, Tensor]]:
    """Scores [Hk, N] and diagnostics [H] of `policy` at `view`, its state built up from the first token.

    Raises:
        KvtoolError: `policy-broken` naming policy and layer; what the policy itself raises as KvtoolError.
    """
    state = state_of(label, policy, layer, view)
    scores = scores_with(label, policy, layer, view, state)
    return scores, diagnoses_of(label, policy, layer, view, state)


def diagnoses_of(label: str, policy: Policy, layer: Layer, view: View, state: Any) -> dict[str, Tensor]:
    """Name -> [H], what `policy` says of how it scored `view`."""
    with blaming(label, policy, layer, view):
        diagnostics = policy.diagnose(state, view)
    _check_diagnostics(label, diagnostics, layer.geometry.query_heads)
    return diagnostics if built_in(policy) else copied(diagnostics)


def state_of(label: str, policy: Policy, layer: Layer, view: View) -> Any:
    """The state of `policy` just before the event of `view`, built up from the first token."""
    return observed(label, policy, layer, started(label, policy, layer, view), view.past())


def started(label: str, policy: Policy, layer: Layer, view: View) -> Any:
    """The state of `policy` before the first token."""
    with blaming(label, policy, layer, view):
        return policy.start(layer.geometry)


def observed(label: str, policy: Policy, layer: Layer, state: Any, view: View) -> Any:
    """The state after the steps view.start..view.step-1."""
    with blaming(label, policy, layer, view):
        # Caches of several budgets go on from one state: what one of them writes into it is its own.
        return policy.observe(state if built_in(policy) else copied(state), view)


def scores_with(label: str, policy: Policy, layer: Layer, view: View, state: Any) -> Tensor:
    """Scores [Hk, N] of `policy` at `view` from a state that may serve several views of the same step."""
    with blaming(label, policy, layer, view):
        scores = policy.score(state, view)
    _check_scores(label, scores, layer, view)
    return scores if built_in(policy) else scores.clone()  # the policy may use the same memory for its next answer


def refined_scores(
    label: str,
    policy: Policy,
    layer: Layer,
    view: View,
    scores: Tensor,
    allowed: list[int],
    shield: Protection,
) -> Tensor:
    """Scores [Hk, N] at one budget; `scores` itself where the policy does not look at the budget."""
    before = None if built_in(policy) else scores.clone()
    with blaming(label, policy, layer, view):
        refined = policy.refine(scores, view, allowed, shield)
    if before is not None and not unchanged(scores, before):  # other budgets are cut from them too
        raise KvtoolError(
            "policy-broken", f"{label} changed the scores it was to refine at layer {layer.geometry.layer}"
        )
    if refined is not scores:
        _check_scores(label, refined, layer, view)
    return refined


def protection_of(label: str, policy: Policy, layer: Layer, view: View, budget: int) -> Protection:
    """What `policy` protects by itself at `budget` tokens per KV head."""
    with blaming(label, policy, layer, view):
        protection = policy.protection(budget)
    if not isinstance(protection, Protection):
        raise KvtoolError("policy-broken", f"{label} gave {type(protection).__name__} as protection")
    return protection


def _check_scores(label: str, scores: object, layer: Layer, view: View) -> None:
    geometry = layer.geometry
    if not isinstance(scores, Tensor) or scores.shape != view.tokens.shape:
        shape = list(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise KvtoolError(
            "policy-broken",
            f"{label} gave scores {shape} at layer {geometry.layer}, expected {list(view.tokens.shape)}",
        )
    if scores.dtype not in (torch.float32, torch.float64):
        raise KvtoolError("policy-broken", f"{label} gave {scores.dtype} scores, expected float32 or float64")
    if not _readable(scores):
        raise KvtoolError(
            "policy-broken", f"{label} gave scores that cannot be read: {scores.layout} on {scores.device}"
        )


def _readable(values: Tensor) -> bool:
    return values.layout == torch.strided and values.device.type == "cpu"


def _check_diagnostics(label: str, diagnostics: object, heads: int) -> None:
    """A dictionary of [H] numbers whose names are no columns of their own."""
    sound = isinstance(diagnostics, dict) and all(
        isinstance(name, str)
        and name.isprintable()
        and isinstance(value, Tensor)
        and tuple(value.shape) == (heads,)
        and _readable(value)
        and not value.is_complex()
        for name, value in diagnostics.items()
    )
    if not sound or not isinstance(diagnostics, dict):
        raise KvtoolError("policy-broken", f"{label} diagnoses something other than named numbers [{heads}]")
    double = sorted((taken().keys() - set(DIAGNOSED)) & set(diagnostics))
    if double:
        raise KvtoolError("policy-broken", f"{label} diagnoses {double[0]}, which is a column already")
