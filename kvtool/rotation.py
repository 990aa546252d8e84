"""Rotary position embedding as a layer really received it: apply, undo, average."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvtool.errors import KvtoolError

Layout = Literal["half", "interleaved"]
_BLOCK = 4096  # rows that are turned at once


@dataclass(frozen=True, eq=False)
class Rotation:
    """Rotary embedding (Su et al., 2104.09864) of one layer.

    Either `inv_freq`, from which any position can be rotated, or `cos` and `sin` as recorded
    for the rows of the sequence (a rotation that is no function of position alone, such as
    dynamic NTK); then positions beyond the recorded rows are unknown.

    Attributes:
        rotary_dims: number of rotated channels R; the others pass through.
        layout: `half` pairs channel i with i + R/2, `interleaved` pairs 2i with 2i + 1.
        inv_freq: [R/2] float32, radians per position.
        attention_scaling: factor on cos and sin (YaRN, longrope); in `cos` and `sin` already.
        rotary_start: first rotated channel (multi-head latent attention rotates the last ones).
        cos, sin: [T, R/2] float32, recorded per row.
    """

    rotary_dims: int
    layout: Layout = "half"
    inv_freq: Tensor | None = None
    attention_scaling: float = 1.0
    rotary_start: int = 0
    cos: Tensor | None = None
    sin: Tensor | None = None

    @property
    def by_position(self) -> bool:
        """Whether rows that were never recorded (future positions) can be rotated."""
        return self.inv_freq is not None

    def tables(self, positions: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """cos and sin, each [n, R/2] float32, scaling included.

        Angles are float32 products, as every model computes them: float64 angles would be
        more exact than the keys that the model cached.

        Args:
            positions: [n] rotary positions.
            rows: [n] row indices, used by recorded tables.
        """
        if self.inv_freq is not None:
            angles = positions.to(torch.float32)[:, None] * self.inv_freq.to(torch.float32)[None, :]
            return angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling
        if self.cos is None or self.sin is None or rows is None:
            raise KvtoolError(
                "trace-lacks",
                "this layer's rotation was recorded row by row, so positions outside the sequence cannot be rotated",
            )
        return self.cos[rows], self.sin[rows]

    def _turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [..., n, D] turned by cos + i sin [n, R/2]; untouched channels stay bit-equal."""
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
        first, stop = self.rotary_start, self.rotary_start + self.rotary_dims
        part = x[..., first:stop]
        out = x.clone()
        if self.layout == "half":
            a, b = part.chunk(2, dim=-1)
            out[..., first:stop] = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
        else:
            a, b = part[..., 0::2], part[..., 1::2]
            out[..., first:stop:2] = a * cos - b * sin
            out[..., first + 1 : stop : 2] = b * cos + a * sin
        return out

    def rotate(self, x: Tensor, positions: Tensor, rows: Tensor | None = None) -> Tensor:
        """x [..., n, D] as the model rotates it at `positions` [n]."""
        return self._turn(x, *self.tables(positions, rows))

    def unrotate(self, x: Tensor, positions: Tensor, rows: Tensor | None = None) -> Tensor:
        """The inverse of `rotate`, the attention scaling divided out."""
        return self._turn(x, *self._back(positions, rows))

    def unrotate_each(
        self, several: Iterable[Tensor], positions: Tensor, rows: Tensor | None = None
    ) -> Iterator[Tensor]:
        """`unrotate` of one tensor [n, D] after another, in memory that hardly exceeds it."""
        cos, sin = self._back(positions, rows)
        for x in several:
            out = torch.empty_like(x)
            cos, sin = cos.to(x.dtype), sin.to(x.dtype)
            for block in torch.arange(len(x)).split(_BLOCK):
                part = slice(int(block[0]), int(block[-1]) + 1)
                out[part] = self._turn(x[part], cos[part], sin[part])
            yield out

    def _back(self, positions: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor]:
        """cos and sin of the inverse, each [n, R/2] float64."""
        cos, sin = (table.to(torch.float64) for table in self.tables(positions, rows))
        square = cos * cos + sin * sin
        return cos / square, -sin / square

    def rotate_by_mean(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [..., D] under the rotation averaged over `positions` (Expected Attention, 2510.00636)."""
        cos, sin = (table.to(torch.float64).mean(0, keepdim=True) for table in self.tables(positions))
        return self._turn(x[..., None, :], cos, sin)[..., 0, :]

    def mean_matrix(self, positions: Tensor, dim: int) -> Tensor:
        """The averaged rotation as a matrix [D, D] in float64, acting on column vectors."""
        return self.rotate_by_mean(torch.eye(dim, dtype=torch.float64), positions).T
