"""Where the operations run: plain torch on the CPU, or their Triton versions on a card."""

from kvtool.kernels.device.card import DEVICES, Card, DeviceError, find_card
from kvtool.kernels.device.log import Log, merged, summary
from kvtool.kernels.device.running import Running, Unsupported, active, door, hand_over, on_cpu, using

__all__ = [
    "DEVICES",
    "Card",
    "DeviceError",
    "Log",
    "Running",
    "Unsupported",
    "active",
    "door",
    "find_card",
    "hand_over",
    "merged",
    "on_cpu",
    "summary",
    "using",
]
