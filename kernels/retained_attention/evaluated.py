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
from .vectors import Masses, Vectors

FEW = 512  # pairs of a cell and a row: families over all columns are dearer


def evaluated(
    span: HeadSpan,
    part: slice,
    full: Tensor | None = None,
    log_sum_exp: Tensor | None = None,
    rows: Tensor | None = None,
) -> Evaluated:
    """The query rows of the steps `part`, or `rows` of them.

    Args:
        full, log_sum_exp: [r, Dv] f_V and [r] its log-sum-exp where they are known, of these rows.
        rows: [r] which of the G b rows; None is all, in the span's own memory until the next tile.
    """
    inputs = span.inputs
    steps, first = inputs.steps[part], inputs.first_visible[part]
    partial = ((span.rows > steps.min()) | (span.rows < first.max())).nonzero()[:, 0]
    found = span.rows[partial, None]
    visible = (first <= found) & (found <= steps)  # [n', b]
    logits = span.logits(part, slice(None) if rows is None else rows, span.memory.logits if rows is None else None)
    if partial.numel():
        logits[partial] = logits[partial].masked_fill(~_spread(visible, rows, inputs.group), float("-inf"))
    sinks = inputs.sinks(inputs.query_heads_of(span.kv_head), part)
    tile = Tile.of(logits, sinks if sinks is None or rows is None else sinks[rows], log_sum_exp)
    return Evaluated(span, part, tile, partial, visible, full, rows, both=span.which == "all")


def _spread(by_step: Tensor, rows: Tensor | None, group: int) -> Tensor:
    """[..., r] of what is said of each of the b steps, [..., b]; row r belongs to step r mod b."""
    if rows is None:
        return by_step.repeat(*[1] * (by_step.ndim - 1), group)
    return by_step[..., rows % by_step.shape[-1]]


@dataclass(eq=False)
class Evaluated:
    """A tile of r rows, b steps, whose exponentials are known.

    Attributes:
        partial: [n'] columns that only some of the steps see, or none.
        visible: [n', b] which.
        known: [r, Dv] f_V, or None as long as it is not.
        rows: [r] which of the G b rows these are, None for all.
        both: whether errors are taken from both sides of the cut.
    """

    span: HeadSpan
    part: slice
    tile: Tile
    partial: Tensor
    visible: Tensor
    known: Tensor | None
    rows: Tensor | None
    both: bool
    _first: list[Sums] | None = field(default=None, repr=False)

    @property
    def steps(self) -> Tensor:
        """[b]."""
        return self.span.inputs.steps[self.part]

    @property
    def full(self) -> Tensor:
        """[r, Dv] f_V: the sum over all levels of the first chain, which are kept for it, or on its own where cells
        shall not depend on each other."""
        if self.known is None:
            exponentials, values = self.tile.exponentials, self.span.values
            if self.span.families and not self.span.grouped:
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
        full = self.full
        for members in self.span.families:
            every = self.both or self._first is not None
            sums, self._first = self._first or members.sums(self.tile, every), None
            masses = [self._masses(members, *pair) for pair in zip(members.family.chains, sums, strict=True)]
            if self.both:
                for one, own in zip(masses, sums, strict=True):
                    yield self._from_both_sides(members, one, own, full)
                continue
            close = torch.stack([one.close.any(0) for one in masses]).any(0).nonzero()[:, 0]
            saved = [sums_of.only(close) for sums_of in sums] if close.numel() else []
            found = [self._from_output(members, one, own, full) for one, own in zip(masses, sums, strict=True)]
            if close.numel():
                self._replace(members, close, found, [one.close for one in masses], saved, every)
            yield from found

    def _replace(
        self,
        members: Members,
        rows: Tensor,
        found: list[Vectors],
        close: list[Tensor],
        sums: list[Sums],
        every: bool,
    ) -> None:
        """Errors of the rows `rows`, where they are `close`, from both sides of the cut; in place.

        Args:
            sums: per chain the levels of these rows, of all tokens where `every`.
        """
        span, full = self.span, self.full[rows]
        if span.drops and rows.numel() * sum(len(one) for one in close) <= FEW:
            self._replace_few(rows, members.family.chains, found, close)
            return
        if not span.drops:
            tile = self.tile.only(rows)
            again = Evaluated(span, self.part, tile, self.partial, self.visible, full, rows, both=True)
            if not every:
                members.add_lost_by_all(tile, sums)
            exact = again.of_family(members, sums)
        else:
            exact = evaluated(span.undropped(members), self.part, full, None, rows).vectors()
        sides = {
            cell: (difference, mass)
            for vectors in exact
            for cell, difference, mass in zip(vectors.cells, vectors.difference, vectors.mass(), strict=True)
        }
        for vectors, where in zip(found, close, strict=True):
            for place, cell in enumerate(vectors.cells):
                mine, (difference, mass) = where[place, rows], sides[cell]
                vectors.difference[place, rows[mine]] = difference[mine]
                vectors.mass_of[place, rows[mine]] = mass[mine]

    def _replace_few(self, rows: Tensor, chains: list[Chain], found: list[Vectors], close: list[Tensor]) -> None:
        for chain, vectors, where in zip(chains, found, close, strict=True):
            for place, cell in enumerate(chain.cells):
                mine = rows[where[place, rows]]
                if mine.numel():
                    sides = self.span.both_sides(self.part, mine, cell)
                    vectors.difference[place, mine] = sides.difference
                    vectors.mass_of[place, mine] = sides.mass

    def of_family(self, members: Members, sums: list[Sums]) -> Iterator[Vectors]:
        """Of one family, from both sides."""
        for chain, own in zip(members.family.chains, sums, strict=True):
            yield self._from_both_sides(members, self._masses(members, chain, own), own, self.full)

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
        close = weak | (touched & ((1 - mass / tile.total) < SMALL_MASS))
        return Masses(cells, leaves, mass, holds, touched, weak, close)

    def _named(self, one: Masses) -> list[int]:
        return [self.span.numbers[cell] for cell in one.cells]

    def _from_output(self, members: Members, one: Masses, sums: Sums, full: Tensor) -> Vectors:
        """e = f_V - f_R, in the memory of the sums."""
        numerators = running(sums.numerators[1:], backwards=True)
        self._add_moving(numerators, members, one.leaves, evicted=False)
        mass = one.mass if bool(one.holds.all()) else torch.where(one.holds, one.mass, 1.0)
        error = torch.addcdiv(full, numerators, mass[..., None], value=-1)
        plain = torch.ones_like(mass, dtype=torch.float64)
        return Vectors(self._named(one), full, None, error, plain, one.touched, one.alone)

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
        found = Vectors(self._named(one), full, retained, difference, mass, one.touched, one.alone)
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
            yield cell, torch.where(self._by_row(there), weights, 0.0)

    def _add_moving(self, numerators: Tensor, members: Members, leaves: Tensor, evicted: bool) -> None:
        for cell, own in self._moving(members, leaves, evicted):
            numerators[cell].addmm_(own.T, self.span.values[members.moving])

    def _counts(self, members: Members, chain: Chain, leaves: Tensor) -> tuple[Tensor, Tensor]:
        """[c, r] bool: whether something visible is retained, and whether something visible is evicted."""
        holds, touched = self._among_columns(members, chain, leaves)
        if self.span.drops:
            touched = touched | self._sees_dropped
        return holds, touched

    def _by_row(self, by_step: Tensor) -> Tensor:
        """[..., r] of [..., b]."""
        return _spread(by_step, self.rows, self.span.inputs.group)

    def _among_columns(self, members: Members, chain: Chain, leaves: Tensor) -> tuple[Tensor, Tensor]:
        count, rows = len(chain.cells), int(self.tile.shift.numel())
        plain = self._everywhere & ~members.moves
        always = chain.levels[plain]
        cells = torch.arange(count)[:, None]
        most, least = (int(always.max()), int(always.min())) if always.size else (0, count)
        holds, touched = cells < most, cells >= least  # [c, 1]: cell j keeps the tokens above level j
        if most == count and least == 0:  # every cell has both, whatever else there is
            return holds.expand(-1, rows), touched.expand(-1, rows)
        special = ~plain
        if not members.moving.numel() and bool((chain.levels[special] == count).all()):
            # the steps' own tokens, the usual case: nobody evicts them
            return holds | self._by_row(self.visible.any(0)), touched.expand(-1, rows)
        index = torch.from_numpy(special.nonzero()[0])
        found, first = self.span.rows[index, None], self.span.inputs.first_visible[self.part]
        seen = (first <= found) & (found <= self.steps)  # [s, b]
        gone = leaves[:, index, None] <= self.steps  # [c, s, b]
        return (
            holds | self._by_row((seen & ~gone).any(1)),
            touched | self._by_row((seen & gone).any(1)),
        )

    @cached_property
    def _sees_dropped(self) -> Tensor:
        """[r] bool."""
        return self._by_row(self.span.sees_dropped(self.part))

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
        among = rows if self.rows is None else self.rows[rows]  # of the G b
        at = among % self.steps.numel()
        logits = span.logits(self.part, among)
        logits[self.partial] = logits[self.partial].masked_fill(~self.visible[:, at], float("-inf"))
        sinks = inputs.sinks(inputs.query_heads_of(span.kv_head), self.part)
        for cell in weak.any(1).nonzero()[:, 0].tolist():
            mine = weak[cell, rows].nonzero()[:, 0]
            gone = leaves[cell][:, None] <= self.steps[at[mine]]  # [n, w]
            own = None if sinks is None else sinks[among[mine]]
            again = by_own_maximum(logits[:, mine], gone, span.values, own)
            retained[cell, rows[mine]] = again.retained
            found.difference[cell, rows[mine]] = again.difference
            found.mass_of[cell, rows[mine]] = again.mass
