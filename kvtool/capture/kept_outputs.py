"""Kept outputs: what a layer's attention gave in the run itself, for the gradient pass to be held against."""

from __future__ import annotations

import torch
from torch import Tensor


class KeptOutputs:
    """One layer's attention outputs in the run's own dtype.

    Args:
        steps: half-open range to keep; its end may be None, whatever the run's length.
    """

    def __init__(self, steps: tuple[int, int | None]) -> None:
        self._first, self._stop = steps
        self._rows: list[Tensor] = []

    def push(self, outputs: Tensor, start: int) -> None:
        """Keep what is wanted of outputs [n, H, Dv] of the steps from `start` on; calls come in order."""
        stop = len(outputs) if self._stop is None else max(self._stop - start, 0)
        kept = outputs.detach()[max(self._first - start, 0) : stop]
        if len(kept):
            self._rows.append(kept.clone())

    def of(self, steps: range) -> Tensor:
        """[n, H, Dv] of these steps, every one of which was kept."""
        if len(self._rows) > 1:
            self._rows = [torch.cat(self._rows)]
        low, high = steps.start - self._first, steps.stop - self._first
        if not self._rows or not 0 <= low < high <= len(self._rows[0]):
            raise AssertionError(f"the outputs of steps {steps.start}:{steps.stop} were not kept")
        return self._rows[0][low:high]
