"""Cell vectors: what a tile of query rows of one KV head gives over the sets of every family of cells."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .families import Family, families_of
from .inputs import Inputs, Seen
from .own_maximum import by_own_maximum
from .tile import SMALL_MASS, TINY, Sums, Tile, atom_sums, over_cells


@dataclass(frozen=True, eq=False)
class Vectors:
    """Some cells over the r rows of a tile.

    Attributes:
        cells: [k] which cells.
        full: [r, Dv] f_V.
        retained: [k, r, Dv] f_R.
        difference: [k, r, Dv] fE - f_R; where `plain`, e itself.
        mass_of: [k, r] float64, share of attention evicted; 1 where `difference` is e itself.
        touched: [k, r] bool, something visible is evicted.
    """

    cells: Tensor
    full: Tensor
    retained: Tensor
    difference: Tensor
    mass_of: Tensor
    touched: Tensor

    def error(self) -> Tensor:
        """[k, r, Dv] e."""
        return self.difference * torch.where(self.touched, self.mass_of, 0.0).to(self.full.dtype)[..., None]

    def gap(self) -> Tensor:
        """[k, r] float64."""
        return torch.where(self.touched, self._length(), float("nan"))

    def mass(self) -> Tensor:
        """[k, r] float64."""
        return torch.where(self.touched, self.mass_of, 0.0)

    def squared_error(self) -> Tensor:
        """[k, r] float64."""
        return torch.where(self.touched, (self.mass_of * self._length()).square(), 0.0)

    def _length(self) -> Tensor:
        return torch.linalg.vector_norm(self.difference, dim=-1).double()

    def cosine(self) -> Tensor:
        """[k, r] float64, from |e|, |f_V|, |f_R| and e·f_V where the angle is small: 1 - f_V·f_R would cancel."""
        a = torch.linalg.vector_norm(self.full, dim=-1).double()
        b = torch.linalg.vector_norm(self.retained, dim=-1).double()
        along = self.mass_of * (self.difference * self.full).sum(-1).double()
        squared = self.squared_error()
        shorter = (2 * along - squared) / (a + b)  # |f_V| - |f_R|
        small = ((squared - shorter.square()) / (2 * a * b)).clamp_min(0)
        large = 1 - (self.retained * self.full).sum(-1).double() / (a * b)
        found = torch.where(small < 0.05, small, large)
        found = torch.where(self.touched, found, 0.0)
        return torch.where((a > 0) & (b > 0), found, float("nan"))


class Kernel:
    """One KV head over one span of steps.

    Args:
        seen: the columns that some step of the span sees.
        leaves: [C, n] evict_step of these columns.
        steps: [s] the steps of the span.
    """

    def __init__(self, inputs: Inputs, kv_head: int, seen: Seen, leaves: Tensor, steps: Tensor, which: str) -> None:
        self.inputs, self.kv_head, self.which = inputs, kv_head, which
        self.keys, self.values = seen.pick(inputs.keys[kv_head]), seen.pick(inputs.values[kv_head])
        self.rows, self.tiny = seen.pick(inputs.rows), TINY[self.values.dtype]
        changes = (leaves > steps.min()) & (leaves <= steps.max())  # [C, n]
        self.cells = []
        for family in families_of(leaves > steps.min()):
            moving = changes[family.cells].any(0)
            self.cells.append(Cells(self, family.without(moving), leaves[family.cells], moving.nonzero()[:, 0]))

    def tile(self, part: slice, full: Tensor | None) -> Evaluated:
        """The rows of the steps `part`, f_V [r, Dv] given or not."""
        inputs = self.inputs
        steps, first = inputs.steps[part], inputs.first_visible[part]
        visible = (first[None, :] <= self.rows[:, None]) & (self.rows[:, None] <= steps[None, :])  # [n, b]
        partial = (~visible.all(1)).nonzero()[:, 0]
        logits = self.logits(part, slice(None))
        if partial.numel():
            hidden = (~visible[partial]).repeat(1, inputs.group)
            logits[partial] = logits[partial].masked_fill(hidden, float("-inf"))
        tile = Tile.of(logits, inputs.sinks(inputs.query_heads_of(self.kv_head), part))
        return Evaluated(self, part, tile, visible, partial, full)

    def logits(self, part: slice, rows: slice | Tensor) -> Tensor:
        """[n, r] of the rows `rows` of the tile, whether visible or not."""
        inputs = self.inputs
        queries = inputs.queries[inputs.query_heads_of(self.kv_head), part].reshape(-1, inputs.queries.shape[2])[rows]
        logits = self.keys @ queries.T
        logits *= inputs.scale
        if inputs.softcap is not None:
            logits = logits.div_(inputs.softcap).tanh_().mul_(inputs.softcap)
        return logits


class Cells:
    """A family over one span of steps of one KV head.

    Args:
        family: without the tokens `moving`.
        leaves: [k, n] evict_step.
        moving: columns that some cell of the family evicts inside the span: on one side for some rows, on the other
            for the rest.
    """

    def __init__(self, kernel: Kernel, family: Family, leaves: Tensor, moving: Tensor) -> None:
        self.family, self.leaves, self.moving = family, leaves, moving
        self.values = kernel.values[family.order]
        self.keeps = family.keeps.to(self.values.dtype)  # [k, A]

    @property
    def kept_atoms(self) -> int:
        """Atoms that some cell keeps."""
        return self.family.atoms - self.family.lost_by_all

    def sums(self, tile: Tile, every: bool) -> Sums:
        """Over the atoms, or over those that some cell keeps."""
        return atom_sums(tile, self.family, self.values, 0, self.family.atoms if every else self.kept_atoms)

    def with_last(self, tile: Tile, sums: Sums) -> Sums:
        """The sums with the atom that every cell evicts."""
        if len(sums.numerators) == self.family.atoms:
            return sums
        last = atom_sums(tile, self.family, self.values, self.kept_atoms, self.family.atoms)
        return Sums(
            torch.cat([sums.numerators, last.numerators]), torch.cat([sums.denominators, last.denominators])
        )

    def side(self, evaluated: Evaluated, sums: Sums, evicted: bool) -> Sums:
        """[k, r, Dv] and [k, r], what every cell keeps, or what it evicts."""
        members = (1 - self.keeps if evicted else self.keeps)[:, : len(sums.numerators)]
        found = over_cells(sums.numerators, sums.denominators, members)
        if self.moving.numel():
            weights, values = evaluated.tile.exponentials[self.moving], evaluated.kernel.values[self.moving]
            gone = self.leaves[:, self.moving, None] <= evaluated.steps  # [k, m, b]
            for cell, mine in enumerate(gone):
                there = mine if evicted else ~mine
                own = torch.where(there.repeat(1, evaluated.kernel.inputs.group), weights, 0.0)
                found.numerators[cell].addmm_(own.T, values)
                found.denominators[cell] += own.sum(0)
        return found


@dataclass(eq=False)
class Evaluated:
    """A tile of r rows, b steps, whose exponentials are known.

    Attributes:
        visible: [n, b].
        partial: columns that only some of the steps see.
        known: [r, Dv] f_V, or None as long as it is not.
    """

    kernel: Kernel
    part: slice
    tile: Tile
    visible: Tensor
    partial: Tensor
    known: Tensor | None
    _first: Sums | None = field(default=None, repr=False)

    @property
    def steps(self) -> Tensor:
        """[b]."""
        return self.kernel.inputs.steps[self.part]

    @property
    def full(self) -> Tensor:
        """[r, Dv] f_V: the sum over all atoms of the first family, which is kept for it."""
        if self.known is None:
            exponentials, values = self.tile.exponentials, self.kernel.values
            if self.kernel.cells:
                first = self.kernel.cells[0]
                self._first = first.sums(self.tile, every=True)
                numerator = self._first.numerators.sum(0)
                if first.moving.numel():
                    numerator.addmm_(exponentials[first.moving].T, values[first.moving])
            else:
                numerator = exponentials.T @ values
            total = self.tile.total[:, None]
            self.known = torch.where(total > 0, numerator / total, 0.0)
        return self.known

    def vectors(self) -> Iterator[Vectors]:
        """Family by family."""
        for cells in self.kernel.cells:
            yield self._over(cells)

    def _over(self, cells: Cells) -> Vectors:
        kernel, tile, full = self.kernel, self.tile, self.full
        both = kernel.which == "all"
        holds, touched = self._counts(cells)
        sums, self._first = self._first or cells.sums(tile, both), None
        rest = cells.side(self, sums, evicted=False)
        kept_mass = rest.denominators if tile.sink is None else rest.denominators + tile.sink
        retained = torch.where(holds[..., None], rest.numerators.div_(kept_mass[..., None]), 0.0)
        weak = holds & (kept_mass < kernel.tiny)
        if not both:
            close = (1 - kept_mass / tile.total) < 2 * SMALL_MASS
            if not bool((touched & (close | weak)).any()):
                plain = torch.ones_like(kept_mass, dtype=torch.float64)
                return Vectors(cells.family.cells, full, retained, full - retained, plain, touched)
            sums = cells.with_last(tile, sums)
        lost = cells.side(self, sums, evicted=True)
        difference = lost.numerators.div_(lost.denominators[..., None]).sub_(retained)
        difference = torch.where(touched[..., None], difference, 0.0)
        gone, left = lost.denominators.double(), kept_mass.double()
        mass = torch.where(touched, gone / (gone + left), 0.0)
        found = Vectors(cells.family.cells, full, retained, difference, mass, touched)
        weak = touched & (weak | (lost.denominators < kernel.tiny))
        if bool(weak.any()):
            self._again(cells, weak, found)
        return found

    def _counts(self, cells: Cells) -> tuple[Tensor, Tensor]:
        """[k, r] bool: whether something visible is retained, and whether something visible is evicted."""
        leaves, steps = cells.leaves, self.steps
        special = torch.zeros(len(self.visible), dtype=torch.bool)
        special[self.partial], special[cells.moving] = True, True
        plain, special = leaves[:, ~special] > steps.min(), special.nonzero()[:, 0]
        holds, touched = plain.any(1)[:, None], (~plain).any(1)[:, None]  # [k, 1]
        seen = self.visible[special]  # [s, b]
        gone = leaves[:, special, None] <= steps  # [k, s, b]
        holds = holds | (seen & ~gone).any(1)
        touched = touched | (seen & gone).any(1)
        return holds.repeat(1, self.kernel.inputs.group), touched.repeat(1, self.kernel.inputs.group)

    def _again(self, cells: Cells, weak: Tensor, found: Vectors) -> None:
        """Rows in which a side underflows, by its own maximum; in place."""
        kernel, inputs = self.kernel, self.kernel.inputs
        rows = weak.any(0).nonzero()[:, 0]
        at = rows % self.steps.numel()
        logits = kernel.logits(self.part, rows).masked_fill_(~self.visible[:, at], float("-inf"))
        sinks = inputs.sinks(inputs.query_heads_of(kernel.kv_head), self.part)
        for cell in weak.any(1).nonzero()[:, 0].tolist():
            mine = weak[cell, rows].nonzero()[:, 0]
            gone = cells.leaves[cell][:, None] <= self.steps[at[mine]]  # [n, w]
            own = None if sinks is None else sinks[rows[mine]]
            again = by_own_maximum(logits[:, mine], gone, kernel.values, own)
            found.retained[cell, rows[mine]] = again.retained
            found.difference[cell, rows[mine]] = again.difference
            found.mass_of[cell, rows[mine]] = again.mass.double()
