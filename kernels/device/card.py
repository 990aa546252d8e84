"""Card: what `--device` names, found or refused."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass

import torch

DEVICES = ("auto", "cpu", "cuda")
INTERPRETER = "interpreter"  # Triton's own, on the CPU and a thousand times slower: for tests
OLDEST = 8  # major compute capability of the first architecture that the kernels are compiled and checked for


class DeviceError(ValueError):
    """The device that was asked for is not here.

    Attributes:
        hint: what to do instead.
    """

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True)
class Card:
    """Where Triton's versions run.

    Attributes:
        kind: `cuda`, or `interpreter` in tests.
        name: as the driver calls the card.
        place: the torch device that holds the arrays.
    """

    kind: str
    name: str
    place: str


def find_card(device: str) -> Card | None:
    """The card that `device` asks for; None where the CPU is meant.

    `auto` takes a card where there is one that Triton can use, and the CPU elsewhere.

    Raises:
        DeviceError: for another word, or `cuda` without a card or without Triton.
    """
    if device == INTERPRETER and os.environ.get("TRITON_INTERPRET") == "1":
        return Card(INTERPRETER, "Triton's interpreter", "cpu")
    if device not in DEVICES:
        raise DeviceError(f"--device {device} is unknown", f"known: {', '.join(DEVICES)}")
    if device == "cpu":
        return None
    missing = _missing()
    if missing is None:
        return Card("cuda", torch.cuda.get_device_name(), "cuda")
    if device == "cuda":
        raise DeviceError(f"--device cuda: {missing}", "--device cpu, or auto, runs the same replay on the CPU")
    return None


def _missing() -> str | None:
    """What stands between Triton's versions and a card, None where nothing does."""
    if not torch.cuda.is_available():
        built = torch.version.cuda is not None
        return "torch finds no CUDA card here" if built else "this torch was built without CUDA, so it finds no card"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    major, minor = torch.cuda.get_device_capability()
    if major < OLDEST:
        return (
            f"{torch.cuda.get_device_name()} is of compute capability {major}.{minor}, and the kernels need {OLDEST}.0"
        )
    return None
