"""Cards: what `--device` names, and what ran there, in the words of a replay."""

from __future__ import annotations

from collections.abc import Callable

from kvtool.errors import KvtoolError
from kvtool.kernels.device import DEVICES, Card, DeviceError, find_card, summary
from kvtool.registry import did_you_mean
from kvtool.result import Result


def card_of(device: str) -> Card | None:
    """The card that `device` asks for, None for the CPU.

    Raises:
        KvtoolError: `usage` for an unknown word, `device` where it is not here.
    """
    try:
        return find_card(device)
    except DeviceError as error:
        if device in DEVICES:
            raise KvtoolError("device", str(error), error.hint) from None
        raise KvtoolError("usage", str(error), did_you_mean(device, list(DEVICES))) from None


def noted(result: Result, note: Callable[[str], None] | None) -> Result:
    """`result`, once it was said which operations ran on a card, and why others did not."""
    if note is not None and result.manifest["card"] is not None:
        note(f"{result.manifest['card']}: {summary(result.manifest['kernels'])}")
    return result
