"""Running: the operations of one unit of work on a card, with what was moved there and what ran.

An operation's door asks whether a card is in use. If so its Triton version gets the same arguments, with the tensors
on the card, and what it returns comes back to the CPU; where it cannot run, the CPU version does, and the log says why.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from kvtool.kernels.device.card import Card
from kvtool.kernels.device.log import Log

WIDE = "float64 was asked for, and the kernel is float32"
_ACTIVE: ContextVar[Running | None] = ContextVar("running", default=None)


class Unsupported(Exception):
    """What a Triton version raises for arguments that it has no kernel for; the text is the reason in the log."""


class Running:
    """A card in use.

    Args:
        wide: float64 is asked for, so kernels that lack it stay out.

    Attributes:
        log: which version of every operation ran.
    """

    def __init__(self, card: Card, wide: bool = False) -> None:
        self.card, self.wide, self.log = card, wide, Log()
        self._moved: dict[int, tuple[weakref.ref[Tensor], int, Tensor]] = {}

    def moved(self, value: Any) -> Any:
        """`value` with its tensors on the card. The same tensor, unchanged, is moved once."""
        if not isinstance(value, Tensor) or self.card.place == "cpu":
            return value
        known = self._moved.get(id(value))
        if known is not None and known[0]() is value and known[1] == value._version:
            return known[2]
        key, there = id(value), value.to(self.card.place)
        self._moved[key] = (weakref.ref(value, lambda _: self._moved.pop(key, None)), value._version, there)
        return there

    def call(self, op: str, name: str, reference: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """`reference(*args, **kwargs)`, by the function `name` of the operation's Triton module where that can."""
        found, reason = self._version(op, name, args)
        if found is not None:
            try:
                moved = [self.moved(value) for value in args], {key: self.moved(v) for key, v in kwargs.items()}
                result = home(found(*moved[0], **moved[1]))
                self.log.ran(op)
                return result
            except Unsupported as error:
                reason = str(error)
            except torch.OutOfMemoryError:
                reason = "the card's memory is too small"
            except Exception as error:
                if type(error).__name__ != "OutOfResources":  # Triton's, of shared memory or registers
                    raise
                reason = "the card's shared memory is too small"
        self.log.ran(op, reason)
        return reference(*args, **kwargs)

    def _version(self, op: str, name: str, args: Any) -> tuple[Callable[..., Any] | None, str]:
        try:
            module = importlib.import_module(f"kvtool.kernels.{op}.triton")
        except ImportError as error:
            return None, f"it has no Triton version: {error}" if error.name == "triton" else "it has no Triton version"
        if not hasattr(module, name):
            return None, f"{name} has no Triton version"
        # A policy may compute in float64 what is needed in float32 only; a kernel that may round says so itself.
        given = not getattr(module, "ROUNDS", False) and any(
            isinstance(value, Tensor) and value.dtype == torch.float64 for value in args
        )
        if (self.wide or given) and name not in getattr(module, "FLOAT64", ()):
            return None, WIDE
        return getattr(module, name), ""


def home(value: Any) -> Any:
    """A result with its tensors on the CPU: a tensor, a dataclass, a list or tuple of them, anything else as it is.
    What has a method `home` says itself which of its tensors come along."""
    if isinstance(value, Tensor):
        return value.cpu()
    if hasattr(value, "home"):
        return value.home()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {one.name: home(getattr(value, one.name)) for one in dataclasses.fields(value) if one.init}
        return dataclasses.replace(value, **fields)
    if type(value) in (list, tuple):
        return type(value)(home(one) for one in value)
    return value


@contextmanager
def using(card: Card | None, wide: bool = False) -> Iterator[Running | None]:
    """Run the operations inside on `card`; None is the CPU. What was moved there is dropped at the end."""
    running = None if card is None else Running(card, wide)
    token = _ACTIVE.set(running)
    try:
        yield running
    finally:
        _ACTIVE.reset(token)
        if running is not None:
            running._moved.clear()


def active() -> Running | None:
    """The card in use; None on the CPU."""
    return _ACTIVE.get()


def hand_over(op: str, reason: str) -> None:
    """A Triton version says that the CPU computes a part of its answer."""
    running = _ACTIVE.get()
    if running is not None:
        running.log.because(op, reason)


def on_cpu(op: str, reason: str) -> None:
    """A caller computes what `op` is for on the CPU, by other means than its doors."""
    running = _ACTIVE.get()
    if running is not None:
        running.log.ran(op, reason)


def door(op: str, reference: Callable[..., Any]) -> Callable[..., Any]:
    """`reference` on the CPU, and the function of the same name in `kvtool.kernels.<op>.triton` on a card."""

    @functools.wraps(reference)
    def call(*args: Any, **kwargs: Any) -> Any:
        running = _ACTIVE.get()
        if running is None:
            return reference(*args, **kwargs)
        return running.call(op, reference.__name__, reference, args, kwargs)

    return call
