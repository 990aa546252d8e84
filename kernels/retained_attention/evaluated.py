"""Evaluated: a tile of query rows of one KV head against every set, chain of cells by chain of cells."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from .families import Chain
from .head_span import HeadSpan, Members
from .own_maximum import by_own_maximum
from .tile import SMALL_MASS, Sums, Tile, running
from .vectors import Vectors


def evaluated(span: HeadSpan, part: slice, full: Tensor | None = None, log_sum_exp: Tensor | None = None) -> Evaluated:
    """The rows of the steps `part`, f_V [r, Dv] and its log-sum-exp [r] given or not."""
    inputs = span.inputs
    steps, first = inputs.steps[part], inputs.first_visible[part]
    partial = ((span.rows > steps.min()) | (span.rows < first.max())).nonzero()[:, 0]
    rows = span.rows[partial, None]
    visible = (first <= rows) & (rows <= steps)  # [n', b]
    logits = span.logits(part, slice(None), span.memory.logits)
    if partial.numel():
        logits[partial] = logits[partial].masked_fill((~visible).repeat(1, inputs.group), float("-inf"))
    tile = Tile.of(logits, inputs.sinks(inputs.query_heads_of(span.kv_head), part), log_sum_exp)
    return Evaluated(span, part, tile, partial, visible, full)


def _places(cells: list[int]) -> slice | Tensor:
    """As a slice where one follows the other: to write there moves no memory twice."""
    if cells == list(range(cells[0], cells[0] + len(cells))):
        return slice(cells[0], cells[0] + len(cells))
    return torch.tensor(cells)


@dataclass(frozen=True, eq=False)
class Masses:
    """The cells of one chain, before their vectors.

    Attributes:
        cells: which; leaves: [c, n] evict_step.
        mass: [c, r] denominator of the retained side, the sink's share included.
        holds, touched: [c, r] bool: something visible is retained; something visible is evicted.
        weak, close: [c, r] bool: what is retained underflows; f_V - f_R is too small a difference to be taken.
    """

    cells: slice | Tensor
    leaves: Tensor
    mass: Tensor
    holds: Tensor
    touched: Tensor
    weak: Tensor
    close: Tensor


@dataclass(eq=False)
class Evaluated:
    """A tile of r rows, b steps, whose exponentials are known.

    Attributes:
        partial: [n'] columns that only some of the steps see, or none.
        visible: [n', b] which.
        known: [r, Dv] f_V, or None as long as it is not.
        lacks_evicted: some row needs what the span dropped; what `vectors` gave is then to be thrown away.
    """

    span: HeadSpan
    part: slice
    tile: Tile
    partial: Tensor
    visible: Tensor
    known: Tensor | None
    lacks_evicted: bool = False
    _first: list[Sums] | None = field(default=None, repr=False)

    @property
    def steps(self) -> Tensor:
        """[b]."""
        return self.span.inputs.steps[self.part]

    @property
    def full(self) -> Tensor:
        """[r, Dv] f_V: the sum over all levels of the first chain, which are kept for it."""
        if self.known is None:
            exponentials, values = self.tile.exponentials, self.span.values
            if self.span.families:
                first = self.span.families[0]
                self._first = first.sums(self.tile, every=True)
                numerator = self._first[0].numerators.sum(0)
                if first.moving.numel():
                    numerator.addmm_(exponentials[first.moving].T, values[first.moving])
            else:
                numerator = exponentials.T @ values
            total = self.tile.total[:, None]
            self.known = torch.where(total == 0, 0.0, numerator / total)  # a NaN stays one, and is refused
        return self.known

    def vectors(self) -> Iterator[Vectors]:
        """Chain by chain."""
        full, both = self.full, self.span.which == "all"
        for members in self.span.families:
            every = both or self._first is not None
            sums, self._first = self._first or members.sums(self.tile, both), None
            masses = [self._masses(members, *pair) for pair in zip(members.family.chains, sums, strict=True)]
            needed = both or any(bool(one.close.any()) for one in masses)
            if needed and self.span.dropped is not None:
                self.lacks_evicted = True
                return
            if needed and not every:
                members.add_lost_by_all(self.tile, sums)
            for one, own in zip(masses, sums, strict=True):
                if both or bool(one.close.any()):
                    yield self._from_both_sides(members, one, own, full)
                else:
                    yield self._from_output(members, one, own, full)

    def _masses(self, members: Members, chain: Chain, sums: Sums) -> Masses:
        cells, tile = chain.cells, self.tile
        leaves = members.leaves[cells]
        holds, touched = self._counts(members, chain, leaves)
        mass = running(sums.denominators[1:].clone(), backwards=True)
        for cell, own in self._moving(members, leaves, evicted=False):
            mass[cell] += own.sum(0)
        if tile.sink is not None:
            mass += tile.sink
        weak = touched & holds & (mass < self.span.tiny)
        close = weak | (touched & ((1 - mass / tile.total) < 2 * SMALL_MASS))
        return Masses(_places(cells), leaves, mass, holds, touched, weak, close)

    def _from_output(self, members: Members, one: Masses, sums: Sums, full: Tensor) -> Vectors:
        """e = f_V - f_R, in the memory of the sums."""
        numerators = running(sums.numerators[1:], backwards=True)
        self._add_moving(numerators, members, one.leaves, evicted=False)
        mass = one.mass if bool(one.holds.all()) else torch.where(one.holds, one.mass, 1.0)
        error = torch.addcdiv(full, numerators, mass[..., None], value=-1)
        plain = torch.ones_like(mass, dtype=torch.float64)
        return Vectors(one.cells, full, None, error, plain, one.touched)

    def _from_both_sides(self, members: Members, one: Masses, sums: Sums, full: Tensor) -> Vectors:
        """e = m (fE - f_R)."""
        retained = running(sums.numerators[1:].clone(), backwards=True)
        self._add_moving(retained, members, one.leaves, evicted=False)
        retained = retained.div_(one.mass[..., None])
        if not bool(one.holds.all()):
            retained = torch.where(one.holds[..., None], retained, 0.0)
        difference, lost = running(sums.numerators[:-1]), running(sums.denominators[:-1])
        for cell, own in self._moving(members, one.leaves, evicted=True):
            lost[cell] += own.sum(0)
        self._add_moving(difference, members, one.leaves, evicted=True)
        difference = difference.div_(lost[..., None]).sub_(retained)
        if not bool(one.touched.all()):
            difference = torch.where(one.touched[..., None], difference, 0.0)
        gone, left = lost.double(), one.mass.double()
        mass = torch.where(one.touched, gone / (gone + left), 0.0)
        found = Vectors(one.cells, full, retained, difference, mass, one.touched)
        weak = one.touched & (one.weak | (lost < self.span.tiny))
        if bool(weak.any()):
            self._again(one.leaves, weak, found, retained)
        return found

    def _moving(self, members: Members, leaves: Tensor, evicted: bool) -> Iterator[tuple[int, Tensor]]:
        """Per cell the exponentials [m, r] of what is evicted inside the span, 0 in rows that have it on the other
        side."""
        if not members.moving.numel():
            return
        weights = self.tile.exponentials[members.moving]
        gone = leaves[:, members.moving, None] <= self.steps  # [c, m, b]
        for cell, mine in enumerate(gone):
            there = mine if evicted else ~mine
            yield cell, torch.where(there.repeat(1, self.span.inputs.group), weights, 0.0)

    def _add_moving(self, numerators: Tensor, members: Members, leaves: Tensor, evicted: bool) -> None:
        for cell, own in self._moving(members, leaves, evicted):
            numerators[cell].addmm_(own.T, self.span.values[members.moving])

    def _counts(self, members: Members, chain: Chain, leaves: Tensor) -> tuple[Tensor, Tensor]:
        """[c, r] bool: whether something visible is retained, and whether something visible is evicted."""
        holds, touched = self._among_columns(members, chain, leaves)
        if self.span.dropped is not None:
            touched = touched | self.span.sees_dropped(self.part).repeat(self.span.inputs.group)
        return holds, touched

    def _among_columns(self, members: Members, chain: Chain, leaves: Tensor) -> tuple[Tensor, Tensor]:
        count, group = len(chain.cells), self.span.inputs.group
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
        found, first = self.span.rows[index, None], self.span.inputs.first_visible[self.part]
        seen = (first <= found) & (found <= self.steps)  # [s, b]
        gone = leaves[:, index, None] <= self.steps  # [c, s, b]
        holds = holds | (seen & ~gone).any(1)
        touched = touched | (seen & gone).any(1)
        return holds.repeat(1, group), touched.repeat(1, group)

    @cached_property
    def _everywhere(self) -> np.ndarray:
        """[n] bool, columns that every step sees."""
        found = np.ones(len(self.span.rows), dtype=bool)
        found[self.partial.numpy()] = False
        return found

    def _again(self, leaves: Tensor, weak: Tensor, found: Vectors, retained: Tensor) -> None:
        """Rows in which a side underflows, by its own maximum; in place."""
        span, inputs = self.span, self.span.inputs
        rows = weak.any(0).nonzero()[:, 0]
        at = rows % self.steps.numel()
        logits = span.logits(self.part, rows)
        logits[self.partial] = logits[self.partial].masked_fill(~self.visible[:, at], float("-inf"))
        sinks = inputs.sinks(inputs.query_heads_of(span.kv_head), self.part)
        for cell in weak.any(1).nonzero()[:, 0].tolist():
            mine = weak[cell, rows].nonzero()[:, 0]
            gone = leaves[cell][:, None] <= self.steps[at[mine]]  # [n, w]
            own = None if sinks is None else sinks[rows[mine]]
            again = by_own_maximum(logits[:, mine], gone, span.values, own)
            retained[cell, rows[mine]] = again.retained
            found.difference[cell, rows[mine]] = again.difference
            found.mass_of[cell, rows[mine]] = again.mass
