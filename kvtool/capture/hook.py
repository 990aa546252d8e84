"""The attention hook: see every call of a model's attention function without changing its result."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from kvtool.errors import KvtoolError

NAME = "kvtool_capture"


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One call of the attention function, batch axis dropped.

    Attributes:
        module: the attention module that called.
        layer: its own layer id.
        queries: [H, n, D], rotated.
        keys: [Hk, Tk, D], the cache's rows that this call sees, the n newest last; not repeated over groups.
        values: [Hk, Tk, Dv].
        output: [n, H, Dv], what the model's own attention function returned.
        mask: None, or [., n, Tk] as the model built it: True or 0 where visible.
        mask_object: what the model passed, shared by layers that share a mask.
        scale: factor on q·k.
        extras: the other keyword arguments (softcap, s_aux, sliding_window, position_bias, ...).
    """

    module: nn.Module
    layer: int
    queries: Tensor
    keys: Tensor
    values: Tensor
    output: Tensor
    mask: Tensor | None
    scale: float
    extras: dict[str, Any]
    mask_object: Tensor | None = None


class Observer(Protocol):
    """Who is told about attention calls."""

    def wants(self, layer: int) -> bool: ...

    def see(self, call: AttentionCall) -> None: ...


@runtime_checkable
class Hider(Observer, Protocol):
    """An observer that also hides keys: evicted tokens, say."""

    def hidden(self, layer: int, steps: int, columns: int) -> Tensor | None:
        """bool [H, n, Tk], True where the query head does not see the key besides what the model's own mask hides.

        Args:
            steps, columns: n and Tk of the call, the n newest keys last.
        """
        ...


@runtime_checkable
class Shifter(Observer, Protocol):
    """An observer that also adds to attention outputs: a zero to differentiate by, say."""

    def shifted(self, layer: int, output: Tensor) -> Tensor:
        """What the model goes on with in place of `output` [1, n, H, Dv]."""
        ...


_observer: Observer | None = None
_delegate: str = ""


def _delegated(module: nn.Module) -> Callable[..., Any]:
    """The function that the model would have called had kvtool not been there."""
    home = sys.modules[type(module).__module__]
    if _delegate == "eager":
        eager: Callable[..., Any] | None = getattr(home, "eager_attention_forward", None)
        if eager is None:
            raise KvtoolError(
                "model-unsupported", f"{type(module).__name__} has no eager attention function that kvtool could call"
            )
        return eager
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    # A modeling file may override a function locally through its own instance of the table.
    functions = getattr(home, "ALL_ATTENTION_FUNCTIONS", ALL_ATTENTION_FUNCTIONS)
    found: Callable[..., Any] = functions[_delegate]
    return found


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, Any]:
    """Registered as an attention implementation: delegates, then tells the observer."""
    run = _delegated(module)
    layer: int | None = getattr(module, "layer_idx", None)
    result: tuple[Tensor, Any]
    if _observer is None or layer is None or not _observer.wants(layer):
        result = run(module, query, key, value, attention_mask, *args, **kwargs)
        return result
    if query.shape[0] != 1:
        raise KvtoolError("model-unsupported", "a trace holds one sequence: batches and padding are refused")
    mask = attention_mask
    if isinstance(_observer, Hider):
        mask = _without(_observer.hidden(layer, query.shape[2], key.shape[2]), mask, query.dtype)
    result = run(module, query, key, value, mask, *args, **kwargs)
    if isinstance(_observer, Shifter):
        result = (_observer.shifted(layer, result[0]), *result[1:])
    extras = dict(kwargs)
    scale = extras.pop("scaling", None)
    _observer.see(
        AttentionCall(
            module=module,
            layer=layer,
            queries=query[0],
            keys=key[0],
            values=value[0],
            output=result[0][0],
            mask=None if attention_mask is None else attention_mask[0],
            mask_object=attention_mask,
            scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
            extras=extras,
        )
    )
    return result


def _without(hidden: Tensor | None, mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The mask [1, ., n, Tk] with the `hidden` keys taken out, in the kind that the delegate understands."""
    if hidden is None:
        return mask
    lowest = torch.finfo(dtype).min
    n, columns = hidden.shape[-2:]
    if mask is None:
        # No mask: one query sees every column, several are plain causal over as many keys.
        mask = (torch.arange(columns)[None, :] <= torch.arange(n)[:, None] + (columns - n))[None, None]
        if _delegate == "eager":
            mask = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, lowest)
    mask = mask[..., :columns]
    return mask & ~hidden[None] if mask.dtype == torch.bool else mask.masked_fill(hidden[None], lowest)


def implementation(model: Any) -> str:
    """The attention implementation that the model itself has chosen: `sdpa`, `eager`, ..."""
    name: str | None = model.config.get_text_config()._attn_implementation
    return name or "eager"


@contextmanager
def observed(model: Any, observer: Observer) -> Iterator[None]:
    """While open, every attention call of `model` is shown to `observer`.

    The mask function of the delegate is registered under the same name: for an unknown name
    the library would build no mask at all, and the model would silently be another one.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    global _observer, _delegate
    if _observer is not None:
        raise KvtoolError("usage", "another capture is running in this process")
    name = implementation(model)
    configs = _configs(model)
    before = [config._attn_implementation_internal for config in configs]
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS[name])
    _observer, _delegate = observer, name
    try:
        model.set_attn_implementation(NAME)
        yield
    finally:
        for config, old in zip(configs, before, strict=True):
            config._attn_implementation_internal = old
        _observer, _delegate = None, ""


def _configs(model: Any) -> list[Any]:
    """Every configuration object of the model and of the models inside it, once."""
    found: dict[int, Any] = {}
    waiting = [module.config for module in model.modules() if hasattr(module, "config")]
    while waiting:
        config = waiting.pop()
        if id(config) in found or not hasattr(config, "_attn_implementation_internal"):
            continue
        found[id(config)] = config
        waiting += [getattr(config, key) for key in getattr(config, "sub_configs", {}) if getattr(config, key, None)]
    return list(found.values())


def softcap(call: AttentionCall) -> float | None:
    """c of c·tanh(z/c), or None."""
    value = call.extras.get("softcap")
    return None if value is None else float(value)


def sink_logits(call: AttentionCall) -> Tensor | None:
    """[H] float32 learned logits that only enter the denominator, or None."""
    value = call.extras.get("s_aux")
    return None if value is None else value.detach().to(torch.float32).reshape(-1).cpu().clone()
