"""Cell vectors: what a tile of query rows of one KV head gives over the sets of every family of cells."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from .families import Chain, Family, families_of
from .inputs import Inputs, Seen
from .own_maximum import by_own_maximum
from .tile import SMALL_MASS, TINY, Sums, Tile, Workspace, add_levels


@dataclass(frozen=True, eq=False)
class Vectors:
    """Some cells over the r rows of a tile.

    Attributes:
        cells: which k cells, as a slice where they follow each other.
        full: [r, Dv] f_V.
        retained: [k, r, Dv] f_R.
        difference: [k, r, Dv] fE - f_R; where `plain`, e itself.
        mass_of: [k, r] float64, share of attention evicted; 1 where `difference` is e itself.
        touched: [k, r] bool, something visible is evicted.
    """

    cells: slice | Tensor
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
        found: Tensor = torch.linalg.vector_norm(self.difference, dim=-1)
        return found.double()

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


def _places(cells: list[int]) -> slice | Tensor:
    """As a slice where one follows the other: to write there moves no memory twice."""
    if cells == list(range(cells[0], cells[0] + len(cells))):
        return slice(cells[0], cells[0] + len(cells))
    return torch.tensor(cells)


@dataclass(frozen=True, eq=False)
class Retained:
    """The retained side of the cells of one chain.

    Attributes:
        cells: which; leaves: [c, n] evict_step.
        retained: [c, r, Dv] f_R; mass: [c, r] its denominator.
        touched, weak, close: [c, r] bool: something visible is evicted; what is retained underflows; f_V - f_R is
            too small a difference to be taken.
    """

    cells: slice | Tensor
    leaves: Tensor
    retained: Tensor
    mass: Tensor
    touched: Tensor
    weak: Tensor
    close: Tensor


class Kernel:
    """One KV head over one span of steps.

    Args:
        seen: the columns that some step of the span sees.
        leaves: [C, n] evict_step of these columns.
        steps: [s] the steps of the span.
        memory: what a tile works in; a tile lives until the next one is made.
    """

    def __init__(
        self, inputs: Inputs, kv_head: int, seen: Seen, leaves: Tensor, steps: Tensor, which: str, memory: Workspace
    ) -> None:
        self.inputs, self.kv_head, self.which, self.memory = inputs, kv_head, which, memory
        self.keys, self.values = seen.pick(inputs.keys[kv_head]), seen.pick(inputs.values[kv_head])
        self.rows, self.tiny = seen.pick(inputs.rows), TINY[self.values.dtype]
        kept = leaves > steps.min()  # [C, n]
        moving = kept & (leaves <= steps.max())
        self.families = []
        for family in families_of(kept, which == "all"):
            cells = [cell for chain in family.chains for cell in chain.cells]
            self.families.append(Members(self, family, leaves, moving[cells].any(0)))

    def tile(self, part: slice, full: Tensor | None) -> Evaluated:
        """The rows of the steps `part`, f_V [r, Dv] given or not."""
        inputs = self.inputs
        steps, first = inputs.steps[part], inputs.first_visible[part]
        partial = ((self.rows > steps.min()) | (self.rows < first.max())).nonzero()[:, 0]
        rows = self.rows[partial, None]
        visible = (first <= rows) & (rows <= steps)  # [n', b]
        logits = self.logits(part, slice(None), self.memory.logits)
        if partial.numel():
            logits[partial] = logits[partial].masked_fill((~visible).repeat(1, inputs.group), float("-inf"))
        tile = Tile.of(logits, inputs.sinks(inputs.query_heads_of(self.kv_head), part))
        return Evaluated(self, part, tile, partial, visible, full)

    def logits(self, part: slice, rows: slice | Tensor, buffer: Tensor | None = None) -> Tensor:
        """[n, r] of the rows `rows` of the tile, whether visible or not; in the memory of `buffer` where given."""
        inputs = self.inputs
        queries = inputs.queries[inputs.query_heads_of(self.kv_head), part].reshape(-1, inputs.queries.shape[2])[rows]
        shape = len(self.keys), len(queries)
        into = None if buffer is None else buffer[: shape[0] * shape[1]].view(shape)
        logits = torch.mm(self.keys, (queries * inputs.scale).T, out=into)
        if inputs.softcap is not None:
            logits = logits.div_(inputs.softcap).tanh_().mul_(inputs.softcap)
        return logits


class Members:
    """A family over one span of steps of one KV head.

    Args:
        leaves: [C, n] evict_step.
        moving: [n] bool, some cell of the family evicts the token inside the span: it is on one side for some rows,
            on the other for the rest, and in no atom.
    """

    def __init__(self, kernel: Kernel, family: Family, leaves: Tensor, moving: Tensor) -> None:
        self.family, self.leaves = family.without(moving.numpy()) if bool(moving.any()) else family, leaves
        self.moving, self.moves, self.memory = moving.nonzero()[:, 0], moving.numpy(), kernel.memory
        self.values = kernel.values[self.family.order]

    def sums(self, tile: Tile, every: bool) -> list[Sums]:
        """Per chain and level, over all atoms or over those that some cell keeps; until it is called again."""
        sizes = [len(chain.cells) + 1 for chain in self.family.chains]
        found = self.memory.levels(sizes, tile.exponentials.shape[1])
        last = self.family.atoms if every else self.family.kept_atoms
        add_levels(found, tile, self.family, self.values, 0, last, self.memory)
        return found

    def add_lost_by_all(self, tile: Tile, sums: list[Sums]) -> None:
        """Put what `sums` without `every` left out to level 0."""
        family = self.family
        add_levels(sums, tile, family, self.values, family.kept_atoms, family.atoms, self.memory)


@dataclass(eq=False)
class Evaluated:
    """A tile of r rows, b steps, whose exponentials are known.

    Attributes:
        partial: [n'] columns that only some of the steps see, or none.
        visible: [n', b] which.
        known: [r, Dv] f_V, or None as long as it is not.
    """

    kernel: Kernel
    part: slice
    tile: Tile
    partial: Tensor
    visible: Tensor
    known: Tensor | None
    _first: list[Sums] | None = field(default=None, repr=False)

    @property
    def steps(self) -> Tensor:
        """[b]."""
        return self.kernel.inputs.steps[self.part]

    @property
    def full(self) -> Tensor:
        """[r, Dv] f_V: the sum over all levels of the first chain, which are kept for it."""
        if self.known is None:
            exponentials, values = self.tile.exponentials, self.kernel.values
            if self.kernel.families:
                first = self.kernel.families[0]
                self._first = first.sums(self.tile, every=True)
                numerator = self._first[0].numerators.sum(0)
                if first.moving.numel():
                    numerator.addmm_(exponentials[first.moving].T, values[first.moving])
            else:
                numerator = exponentials.T @ values
            total = self.tile.total[:, None]
            self.known = torch.where(total > 0, numerator / total, 0.0)
        return self.known

    def vectors(self) -> Iterator[Vectors]:
        """Chain by chain."""
        full, both = self.full, self.kernel.which == "all"
        for members in self.kernel.families:
            every = both or self._first is not None
            sums, self._first = self._first or members.sums(self.tile, both), None
            retained = [self._retained(members, *pair) for pair in zip(members.family.chains, sums, strict=True)]
            if not both and any(bool(one.close.any()) for one in retained):
                if not every:
                    members.add_lost_by_all(self.tile, sums)
                every = True
            for one, own in zip(retained, sums, strict=True):
                yield self._compared(members, one, own, full, both)

    def _retained(self, members: Members, chain: Chain, sums: Sums) -> Retained:
        """f_R of every cell of a chain, and which rows need the evicted side."""
        cells, tile = chain.cells, self.tile
        leaves = members.leaves[cells]
        holds, touched = self._counts(members, chain, leaves)
        kept = Sums(sums.numerators[1:].clone(), sums.denominators[1:].clone()).running(backwards=True)
        self._add_moving(members, leaves, kept, evicted=False)
        mass = kept.denominators if tile.sink is None else kept.denominators + tile.sink
        weak = touched & holds & (mass < self.kernel.tiny)
        close = weak | (touched & ((1 - mass / tile.total) < 2 * SMALL_MASS))
        retained = kept.numerators.div_(mass[..., None])
        if not bool(holds.all()):
            retained = torch.where(holds[..., None], retained, 0.0)
        return Retained(_places(cells), leaves, retained, mass, touched, weak, close)

    def _compared(self, members: Members, one: Retained, sums: Sums, full: Tensor, both: bool) -> Vectors:
        if not both and not bool(one.close.any()):
            plain = torch.ones_like(one.mass, dtype=torch.float64)
            return Vectors(one.cells, full, one.retained, full - one.retained, plain, one.touched)
        lost = Sums(sums.numerators[:-1], sums.denominators[:-1]).running()
        self._add_moving(members, one.leaves, lost, evicted=True)
        difference = lost.numerators.div_(lost.denominators[..., None]).sub_(one.retained)
        if not bool(one.touched.all()):
            difference = torch.where(one.touched[..., None], difference, 0.0)
        gone, left = lost.denominators.double(), one.mass.double()
        mass = torch.where(one.touched, gone / (gone + left), 0.0)
        found = Vectors(one.cells, full, one.retained, difference, mass, one.touched)
        weak = one.touched & (one.weak | (lost.denominators < self.kernel.tiny))
        if bool(weak.any()):
            self._again(one.leaves, weak, found)
        return found

    def _add_moving(self, members: Members, leaves: Tensor, sums: Sums, evicted: bool) -> None:
        """What is evicted inside the span, to the side where each row has it."""
        if not members.moving.numel():
            return
        weights, values = self.tile.exponentials[members.moving], self.kernel.values[members.moving]
        gone = leaves[:, members.moving, None] <= self.steps  # [c, m, b]
        for cell, mine in enumerate(gone):
            there = mine if evicted else ~mine
            own = torch.where(there.repeat(1, self.kernel.inputs.group), weights, 0.0)
            sums.numerators[cell].addmm_(own.T, values)
            sums.denominators[cell].add_(own.sum(0))

    def _counts(self, members: Members, chain: Chain, leaves: Tensor) -> tuple[Tensor, Tensor]:
        """[c, r] bool: whether something visible is retained, and whether something visible is evicted."""
        count, group = len(chain.cells), self.kernel.inputs.group
        plain = self._everywhere & ~members.moves
        always = chain.levels[plain]
        cells = torch.arange(count)[:, None]
        most, least = (int(always.max()), int(always.min())) if always.size else (0, count)
        holds, touched = cells < most, cells >= least  # [c, 1]: cell j keeps the tokens above level j
        rows = group * self.steps.numel()
        if most == count and least == 0:  # every cell has both, whatever else there is
            return holds.expand(-1, rows), touched.expand(-1, rows)
        special = ~plain
        if not members.moving.numel() and bool((chain.levels[special] == count).all()):
            holds = holds | self.visible.any(0)  # the steps' own tokens, the usual case: nobody evicts them
            return holds.repeat(1, group), touched.expand(-1, rows)
        index = torch.from_numpy(special.nonzero()[0])
        found, first = self.kernel.rows[index, None], self.kernel.inputs.first_visible[self.part]
        seen = (first <= found) & (found <= self.steps)  # [s, b]
        gone = leaves[:, index, None] <= self.steps  # [c, s, b]
        holds = holds | (seen & ~gone).any(1)
        touched = touched | (seen & gone).any(1)
        return holds.repeat(1, group), touched.repeat(1, group)

    @cached_property
    def _everywhere(self) -> np.ndarray:
        """[n] bool, columns that every step sees."""
        found = np.ones(len(self.kernel.rows), dtype=bool)
        found[self.partial.numpy()] = False
        return found

    def _again(self, leaves: Tensor, weak: Tensor, found: Vectors) -> None:
        """Rows in which a side underflows, by its own maximum; in place."""
        kernel, inputs = self.kernel, self.kernel.inputs
        rows = weak.any(0).nonzero()[:, 0]
        at = rows % self.steps.numel()
        logits = kernel.logits(self.part, rows)
        logits[self.partial] = logits[self.partial].masked_fill(~self.visible[:, at], float("-inf"))
        sinks = inputs.sinks(inputs.query_heads_of(kernel.kv_head), self.part)
        for cell in weak.any(1).nonzero()[:, 0].tolist():
            mine = weak[cell, rows].nonzero()[:, 0]
            gone = leaves[cell][:, None] <= self.steps[at[mine]]  # [n, w]
            own = None if sinks is None else sinks[rows[mine]]
            again = by_own_maximum(logits[:, mine], gone, kernel.values, own)
            found.retained[cell, rows[mine]] = again.retained
            found.difference[cell, rows[mine]] = again.difference
            found.mass_of[cell, rows[mine]] = again.mass
