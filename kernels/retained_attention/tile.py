"""One tile of query rows of one KV head against every set: sums over atoms, and what they say of each cell."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .families import CHUNK_TOKENS, Family

TINY = {torch.float32: 1e-30, torch.float64: 1e-290}  # denominators below lost digits to underflow
SMALL_MASS = 1.01e-3  # below 1e-3, which 1 - kept knows to 1e-6, f_V - f_R cancels: errors are taken from both sides


def tiny_for(dtype: torch.dtype, least: float) -> float:
    """The denominator below which a sum over values, the smallest token's `least`, may have lost digits: its
    exponentials, or their products with that token, are then no normal numbers."""
    return max(TINY[dtype], torch.finfo(dtype).tiny / least)


@dataclass(frozen=True, eq=False)
class Sums:
    """Sums over k sets of tokens, for the r rows of a tile, exponentials relative to each row's largest logit.

    Attributes:
        numerators: [k, r, Dv], sum of exp · value.
        denominators: [k, r], sum of exp.
    """

    numerators: Tensor
    denominators: Tensor

    def only(self, rows: Tensor) -> Sums:
        """The same for `rows` alone, a copy."""
        return Sums(self.numerators[:, rows], self.denominators[:, rows])


def running(sums: Tensor, backwards: bool = False) -> Tensor:
    """Each of `sums` [k, ...] becomes the sum of itself and all before it, or behind it, in place."""
    places = list(range(len(sums)))
    for before, place in itertools.pairwise(places[::-1] if backwards else places):
        sums[place].add_(sums[before])
    return sums


@dataclass(frozen=True, eq=False)
class Tile:
    """Exponentials of a tile.

    Attributes:
        exponentials: [n, r] exp(logit - shift), 0 where a query does not see the token.
        shift: [r], the largest visible logit, or the sink's where that is larger; or the log-sum-exp.
        sink: [r] exp(sink - shift), or None.
        total: [r], sum over all tokens and the sink.
    """

    exponentials: Tensor
    shift: Tensor
    sink: Tensor | None
    total: Tensor

    def only(self, rows: Tensor) -> Tile:
        """The same for `rows` [r'] alone, a copy."""
        sink = None if self.sink is None else self.sink[rows]
        return Tile(self.exponentials.index_select(1, rows), self.shift[rows], sink, self.total[rows])

    @classmethod
    def of(cls, logits: Tensor, sinks: Tensor | None, log_sum_exp: Tensor | None = None) -> Tile:
        """From logits [n, r], overwritten, -inf where invisible.

        Args:
            sinks: [r] or None.
            log_sum_exp: [r] over all visible tokens and the sink, where that is known: every exponential is then the
                token's weight itself, and tokens may be missing.
        """
        if log_sum_exp is not None:
            shift = torch.where(log_sum_exp == float("-inf"), 0.0, log_sum_exp)
            sink = None if sinks is None else (sinks - shift).exp()
            return cls(logits.sub_(shift).exp_(), shift, sink, (log_sum_exp > float("-inf")).to(logits.dtype))
        top = logits.amax(0) if len(logits) else logits.new_full((logits.shape[1],), float("-inf"))
        if sinks is not None:
            top = torch.maximum(top, sinks)
        shift = torch.where(top == float("-inf"), 0.0, top)
        exponentials = logits.sub_(shift).exp_()
        sink = None if sinks is None else (sinks - shift).exp()
        total = exponentials.sum(0)
        return cls(exponentials, shift, sink, total if sink is None else total + sink)


def _large(count: int, like: Tensor) -> Tensor:
    """[count] anything, by NumPy, which asks the system for huge pages: rows picked out of 4 KiB pages miss the TLB."""
    return torch.from_numpy(np.empty(count, dtype=np.float64 if like.dtype == torch.float64 else np.float32))


class Workspace:
    """Memory that is used over and over: new memory costs more than the sums themselves.

    Args:
        tokens, rows, width: most tokens and rows of a tile, Dv.
        like: dtype and device.

    Attributes:
        logits: [n · r] anything; gathered: likewise for a chunk of tokens.
    """

    def __init__(self, tokens: int, rows: int, width: int, like: Tensor) -> None:
        self._width, self._like = width, like
        self.logits = _large(tokens * rows, like)
        self.gathered = like.new_empty(CHUNK_TOKENS * rows)
        self._numerator = like.new_empty(rows * width)
        self._rows = rows
        self._levels: list[Tensor] = []

    def numerator(self, rows: int) -> Tensor:
        """[r, Dv], anything."""
        return self._numerator[: rows * self._width].view(rows, self._width)

    def levels(self, sizes: list[int], rows: int) -> list[Sums]:
        """One `Sums` of zeros per chain; those of an earlier call are overwritten."""
        found = []
        for place, size in enumerate(sizes):
            if place == len(self._levels):
                self._levels.append(self._like.new_empty(0))
            if self._levels[place].numel() < size * rows * (self._width + 1):
                self._levels[place] = self._like.new_empty(size * self._rows * (self._width + 1))
            numbers = size * rows * self._width
            used = self._levels[place][: numbers + size * rows].zero_()
            found.append(Sums(used[:numbers].view(size, rows, self._width), used[numbers:].view(size, rows)))
        return found


@dataclass(frozen=True, eq=False)
class Chunk:
    """Tokens that are gathered at once.

    Attributes:
        tokens: [m] which, atom by atom.
        atoms, sizes: the atoms and how many of the tokens each has.
        values: per atom the values [size, Dv].
    """

    tokens: Tensor
    atoms: list[int]
    sizes: list[int]
    values: list[Tensor]

    @classmethod
    def of(cls, family: Family, values: Tensor, first: int, last: int) -> list[Chunk]:
        """Of the atoms first..last-1; `values` [n, Dv] in the family's order."""
        found = []
        for parts in family.chunks(first, last):
            tokens = family.order[parts[0][1] : parts[-1][2]]
            sizes = [stop - start for _, start, stop in parts]
            found.append(cls(tokens, [atom for atom, _, _ in parts], sizes, [values[a:b] for _, a, b in parts]))
        return found


def add_levels(into: list[Sums], tile: Tile, family: Family, chunks: list[Chunk], memory: Workspace) -> None:
    """Add the tokens of `chunks` to the levels of every chain, [c + 1, r, Dv] and [c + 1, r]."""
    source = tile.exponentials
    rows = source.shape[1]
    numerator = memory.numerator(rows)
    targets = [sums.numerators.unbind() for sums in into]
    atoms = [atom for chunk in chunks for atom in chunk.atoms]
    denominators = source.new_empty(len(atoms), rows)
    places = iter(denominators.unbind())
    for chunk in chunks:
        gathered = memory.gathered[: len(chunk.tokens) * rows].view(-1, rows)
        torch.index_select(source, 0, chunk.tokens, out=gathered)
        for atom, part, own in zip(chunk.atoms, gathered.split(chunk.sizes), chunk.values, strict=True):
            torch.sum(part, 0, out=next(places))
            if len(targets) == 1:
                targets[0][family.levels[0][atom]].addmm_(part.T, own)
                continue
            torch.mm(part.T, own, out=numerator)
            for target, levels in zip(targets, family.levels, strict=True):
                target[levels[atom]].add_(numerator)
    for sums, levels in zip(into, family.levels, strict=True):
        sums.denominators.index_add_(0, torch.tensor([levels[atom] for atom in atoms], dtype=torch.int64), denominators)
