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
from .tile import SMALL_MASS, Sums, Tile
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
            self.known = torch.where(total > 0, numerator / total, 0.0)
        return self.known

    def vectors(self) -> Iterator[Vectors]:
        """Chain by chain."""
        full, both = self.full, self.span.which == "all"
        for members in self.span.families:
            every = both or self._first is not None
            sums, self._first = self._first or members.sums(self.tile, both), None
            retained = [self._retained(members, *pair) for pair in zip(members.family.chains, sums, strict=True)]
            if not both and any(bool(one.close.any()) for one in retained):
                if self.span.dropped is not None:
                    self.lacks_evicted = True
                    return
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
        weak = touched & holds & (mass < self.span.tiny)
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
        weak = one.touched & (one.weak | (lost.denominators < self.span.tiny))
        if bool(weak.any()):
            self._again(one.leaves, weak, found)
        return found

    def _add_moving(self, members: Members, leaves: Tensor, sums: Sums, evicted: bool) -> None:
        """What is evicted inside the span, to the side where each row has it."""
        if not members.moving.numel():
            return
        weights, values = self.tile.exponentials[members.moving], self.span.values[members.moving]
        gone = leaves[:, members.moving, None] <= self.steps  # [c, m, b]
        for cell, mine in enumerate(gone):
            there = mine if evicted else ~mine
            own = torch.where(there.repeat(1, self.span.inputs.group), weights, 0.0)
            sums.numerators[cell].addmm_(own.T, values)
            sums.denominators[cell].add_(own.sum(0))

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

    def _again(self, leaves: Tensor, weak: Tensor, found: Vectors) -> None:
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
            found.retained[cell, rows[mine]] = again.retained
            found.difference[cell, rows[mine]] = again.difference
            found.mass_of[cell, rows[mine]] = again.mass
