"""One tile of query rows of one KV head against every set: sums over atoms, and what they say of each cell."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .families import CHUNK_TOKENS, Family

TINY = {torch.float32: 1e-30, torch.float64: 1e-290}  # denominators below lost digits to underflow
SMALL_MASS = 1e-3  # below it f_V - f_R cancels, and the error is taken from the evicted side


def tiny_for(values: Tensor) -> float:
    """The denominator below which a sum over `values` [n, Dv] may have lost digits: its exponentials, or their products
    with the smallest of the tokens, are then no normal numbers."""
    sizes = values.abs().amax(1)
    sizes = sizes[sizes > 0]
    least = float(sizes.min()) if sizes.numel() else 1.0
    return max(TINY[values.dtype], torch.finfo(values.dtype).tiny / least)


@dataclass(frozen=True, eq=False)
class Sums:
    """Sums over k sets of tokens, for the r rows of a tile, exponentials relative to each row's largest logit.

    Attributes:
        numerators: [k, r, Dv], sum of exp · value.
        denominators: [k, r], sum of exp.
    """

    numerators: Tensor
    denominators: Tensor


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
        self._levels: list[Sums] = []

    def numerator(self, rows: int) -> Tensor:
        """[r, Dv], anything."""
        return self._numerator[: rows * self._width].view(rows, self._width)

    def levels(self, sizes: list[int], rows: int) -> list[Sums]:
        """One `Sums` of zeros per chain; those of an earlier call are overwritten."""
        for place, size in enumerate(sizes):
            if place == len(self._levels):
                self._levels.append(Sums(self._like.new_empty(0, 0, 0), self._like.new_empty(0, 0)))
            if self._levels[place].numerators.shape != (size, rows, self._width):
                shape = (size, rows, self._width)
                self._levels[place] = Sums(self._like.new_empty(shape), self._like.new_empty(shape[:2]))
            self._levels[place].numerators.zero_()
            self._levels[place].denominators.zero_()
        return self._levels[: len(sizes)]


def add_levels(
    into: list[Sums], tile: Tile, family: Family, values: Tensor, first: int, last: int, memory: Workspace
) -> None:
    """Add the tokens of the atoms first..last-1 to the levels of every chain, [c + 1, r, Dv] and [c + 1, r].

    Args:
        values: [n, Dv] in the family's order.
    """
    source = tile.exponentials
    rows = source.shape[1]
    numerator = memory.numerator(rows)
    targets = [
        [sums.numerators[level] for level in levels] for sums, levels in zip(into, family.levels, strict=True)
    ]  # per chain and atom
    chunks = family.chunks(first, last)
    atoms = [atom for chunk in chunks for atom, _, _ in chunk]
    denominators = source.new_empty(len(atoms), rows)
    places = iter(denominators)
    for chunk in chunks:
        start, stop = chunk[0][1], chunk[-1][2]
        gathered = memory.gathered[: (stop - start) * rows].view(-1, rows)
        torch.index_select(source, 0, family.order[start:stop], out=gathered)
        for atom, low, high in chunk:
            part, own = gathered[low - start : high - start], values[low:high]
            torch.sum(part, 0, out=next(places))
            if len(targets) == 1:
                targets[0][atom].addmm_(part.T, own)
                continue
            torch.mm(part.T, own, out=numerator)
            for target in targets:
                target[atom].add_(numerator)
    for sums, levels in zip(into, family.levels, strict=True):
        sums.denominators.index_add_(0, torch.tensor([levels[atom] for atom in atoms], dtype=torch.int64), denominators)
