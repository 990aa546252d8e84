"""What attention modules are given: hidden states, cosines and sines, kept and given again."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from kvtool.capture.rotation import Tables, received_tables


class ModuleInputs:
    """What each attention module was given: hidden states, to give them again, and cos and sin."""

    def __init__(self) -> None:
        self.hidden: dict[int, Tensor] = {}
        self.tables: dict[int, Tables | None] = {}
        self.keys: dict[int, int | None] = {}
        self.sine_first: dict[int, bool] = {}

    @contextmanager
    def kept(self, modules: dict[int, nn.Module]) -> Iterator[None]:
        """While open, remember what every module receives."""

        def keep(layer: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.hidden[layer] = (args[0] if args else kwargs["hidden_states"]).clone()
            given = position_embeddings_of(self_module(layer), args, kwargs)
            tables = received_tables(given)
            self.sine_first[layer] = tables is not None and tables.sine_first
            self.tables[layer] = tables.swapped() if tables is not None and tables.sine_first else tables
            first = given[0] if isinstance(given, tuple | list) else given
            self.keys[layer] = None if self.tables[layer] is None else id(first)
            self._alive.append(given)  # an id is one object's only while it lives

        def self_module(layer: int) -> nn.Module:
            return modules[layer]

        self._alive: list[Any] = []
        handles = [
            module.register_forward_pre_hook(lambda _, a, k, layer=layer: keep(layer, a, k), with_kwargs=True)
            for layer, module in modules.items()
        ]
        try:
            yield
        finally:
            self._alive.clear()
            for handle in handles:
                handle.remove()

    @contextmanager
    def given_again(self, modules: dict[int, nn.Module]) -> Iterator[None]:
        """While open, every module receives the remembered hidden states instead of its own."""

        def swap(layer: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            if args:
                return (self.hidden[layer], *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": self.hidden[layer]}

        handles = [
            module.register_forward_pre_hook(lambda _, a, k, layer=layer: swap(layer, a, k), with_kwargs=True)
            for layer, module in modules.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def position_embeddings_of(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The `position_embeddings` that an attention module was called with, or None."""
    if "position_embeddings" in kwargs:
        return kwargs["position_embeddings"]
    names = list(inspect.signature(module.forward).parameters)
    if "position_embeddings" in names and names.index("position_embeddings") < len(args):
        return args[names.index("position_embeddings")]
    return None
