"""What a run does to its rotary embedding: held against the probe's finding, recorded where it differs, undone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from kvtool.capture.rotation import Tables, agrees, attention_scaling, frequency_candidates, scaling_candidates
from kvtool.rotation import Rotation


class RotationWatch:
    """Holds the cos and sin of a whole run against a rotation, and records them where they differ.

    Dynamic NTK and longrope change their frequencies with the length of the text, so that keys of
    one cache were turned by several tables. As long as the rotation predicts what is received nothing
    is kept; from the first difference on, cos and sin are recorded row by row.

    Args:
        rotation: as the probe found it, from short positions.
        model: its frequencies of the moment are tried when the first rows already differ.
        sine_first: whether layers receive (sin, cos).
    """

    def __init__(self, rotation: Rotation, model: nn.Module, sine_first: bool) -> None:
        self._rotation, self._model, self._sine_first = rotation, model, sine_first
        self._start, self._count = 0, 0
        self._blocks: list[tuple[Tensor, Tensor]] | None = None

    def begin(self, start: int, count: int) -> None:
        """A forward over rows start..start + count - 1 follows."""
        self._start, self._count = start, count

    def see(self, tables: Tables | None, dtype: torch.dtype) -> None:
        """What the forward's layers received."""
        if tables is None:
            return
        tables = tables.swapped() if self._sine_first else tables
        pairs = tables.pairs(self._rotation.rotary_dims // 2)
        if pairs is None or len(pairs[0]) != self._count:
            return
        positions = torch.arange(self._start, self._start + self._count)
        if self._blocks is None:
            if agrees(self._rotation, tables, positions, dtype) or self._try_others(tables, positions, dtype):
                return
            self._blocks = [self._rotation.tables(torch.arange(self._start))]
        self._blocks.append((pairs[0].clone(), pairs[1].clone()))

    def _try_others(self, tables: Tables, positions: Tensor, dtype: torch.dtype) -> bool:
        """Whether the model has by now other frequencies that explain all rows from the first on."""
        if self._start > 0:
            return False
        scaling = attention_scaling(tables, scaling_candidates(self._model))
        for inv_freq in frequency_candidates(self._model, None):
            other = replace(self._rotation, inv_freq=inv_freq, attention_scaling=scaling)
            if 2 * len(inv_freq) == other.rotary_dims and agrees(other, tables, positions, dtype):
                self._rotation = other
                return True
        return False

    def outcome(self) -> Rotation:
        """The rotation that held all along; else the same with recorded tables [T, R/2]."""
        if self._blocks is None:
            return self._rotation
        cos, sin = (torch.cat([block[i] for block in self._blocks]).cpu() for i in (0, 1))
        return replace(self._rotation, inv_freq=None, cos=cos, sin=sin)


class RotaryState:
    """The mutable state of a model's rotary modules, so that no sequence inherits another's frequencies."""

    def __init__(self, model: nn.Module) -> None:
        self._saved: list[tuple[nn.Module, dict[str, Tensor], dict[str, Any]]] = []
        for module in model.modules():
            buffers = {name: b.clone() for name, b in module.named_buffers(recurse=False) if name.endswith("inv_freq")}
            if buffers:
                kept = ("max_seq_len_cached", "attention_scaling")
                values = {name: value for name, value in vars(module).items() if name.endswith(kept)}
                self._saved.append((module, buffers, values))

    def restore(self) -> None:
        """Put everything back as it was when this object was made."""
        for module, buffers, values in self._saved:
            for name, buffer in buffers.items():
                module.register_buffer(name, buffer.clone(), persistent=False)
            for name, value in values.items():
                setattr(module, name, value)
