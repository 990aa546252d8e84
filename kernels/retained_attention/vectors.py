"""Masses and vectors of some cells over the rows of one tile, and the norms that are told of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SHORT = 1e-15  # of vectors below, the squares leave float32


def squared_norm(vectors: Tensor) -> Tensor:
    """[...] float64 of [..., Dv]: beside a sink an output may be so small that its squares leave float32."""
    found: Tensor = torch.linalg.vector_norm(vectors, dim=-1, dtype=torch.float64)
    return found.square()


@dataclass(frozen=True, eq=False)
class Masses:
    """The cells of one chain, before their vectors.

    Attributes:
        cells: which; leaves: [c, n] evict_step.
        mass: [c, r] denominator of the retained side, the sink's share included.
        holds, touched: [c, r] bool: something visible is retained; something visible is evicted.
        weak, close: [c, r] bool: what is retained underflows; f_V - f_R is too small a difference to be taken.
    """

    cells: list[int]
    leaves: Tensor
    mass: Tensor
    holds: Tensor
    touched: Tensor
    weak: Tensor
    close: Tensor

    @property
    def alone(self) -> Tensor | None:
        """[c, r] bool, something is evicted and nothing retained; None where that never is so."""
        return None if bool(self.holds.all()) else self.touched & ~self.holds


@dataclass(frozen=True, eq=False)
class Vectors:
    """Some cells over the r rows of a tile.

    Attributes:
        cells: which k cells.
        full: [r, Dv] f_V.
        retained: [k, r, Dv] f_R, None where `difference` is e itself.
        difference: [k, r, Dv] fE - f_R, or e itself.
        mass_of: [k, r] float64, share of attention evicted; 1 where `difference` is e itself.
        touched: [k, r] bool, something visible is evicted.
        alone: [k, r] bool, and nothing visible is retained: e is then f_V, bit for bit; None where that never is so.
    """

    cells: list[int]
    full: Tensor
    retained: Tensor | None
    difference: Tensor
    mass_of: Tensor
    touched: Tensor
    alone: Tensor | None = None

    @property
    def places(self) -> slice | Tensor:
        """The cells as a slice where one follows the other: to write there moves no memory twice."""
        first = self.cells[0]
        if self.cells == list(range(first, first + len(self.cells))):
            return slice(first, first + len(self.cells))
        return torch.tensor(self.cells)

    def error(self) -> Tensor:
        """[k, r, Dv] e."""
        share = torch.where(self.touched, self.mass_of, 0.0).to(self.full.dtype)
        found = self.difference * share[..., None]
        return found if self.alone is None else torch.where(self.alone[..., None], self.full, found)

    def gap(self) -> Tensor:
        """[k, r] float64."""
        return torch.where(self.touched, self._length(), float("nan"))

    def mass(self) -> Tensor:
        """[k, r] float64."""
        return torch.where(self.touched, self.mass_of, 0.0)

    def squared_error(self) -> Tensor:
        """[k, r] float64."""
        found = torch.where(self.touched, (self.mass_of * self._length()).square(), 0.0)
        return found if self.alone is None else torch.where(self.alone, squared_norm(self.full), found)

    def _length(self) -> Tensor:
        found: Tensor = torch.linalg.vector_norm(self.difference, dim=-1).double()
        short = self.touched & (found < SHORT)
        if bool(short.any()):
            found[short] = torch.linalg.vector_norm(self.difference[short], dim=-1, dtype=torch.float64)
        return found

    def cosine(self) -> Tensor:
        """[k, r] float64. Where e is short against f_R, from |e|, |f_V|, |f_R| and e·f_V: 1 - f_V·f_R would cancel.
        Elsewhere, one vector perhaps many times the other, from f_V·f_R: |e|^2 - (|f_V| - |f_R|)^2 would cancel."""
        assert self.retained is not None
        a = squared_norm(self.full).sqrt()
        b = torch.linalg.vector_norm(self.retained, dim=-1, dtype=torch.float64)
        direction = (self.full.double() / torch.where(a > 0, a, 1.0)[:, None]).to(self.full.dtype)  # [r, Dv]
        along = self.mass_of * (self.difference * direction).sum(-1).double()  # e·f_V / |f_V|
        squared = self.squared_error()
        shorter = (2 * along * a - squared) / (a + b)  # |f_V| - |f_R|
        short = ((squared - shorter.square()) / (2 * a * b)).clamp_min(0)
        other = (1 - (self.retained * direction).sum(-1).double() / b).clamp_min(0)
        found = torch.where(4 * squared < b.square(), short, other)
        found = torch.where(self.touched, found, 0.0)
        return torch.where((a > 0) & (b > 0), found, float("nan"))
