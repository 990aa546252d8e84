"""One tile of query rows of one KV head against every set: sums over atoms, and what they say of each cell."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .families import CHUNK_TOKENS, Family

TINY = {torch.float32: 1e-30, torch.float64: 1e-290}  # denominators below lost digits to underflow
SMALL_MASS = 1e-3  # below it f_V - f_R cancels, and the error is taken from the evicted side


@dataclass(frozen=True, eq=False)
class Sums:
    """Sums over k sets of tokens, for the r rows of a tile, exponentials relative to each row's largest logit.

    Attributes:
        numerators: [k, r, Dv], sum of exp · value.
        denominators: [k, r], sum of exp.
    """

    numerators: Tensor
    denominators: Tensor


@dataclass(frozen=True, eq=False)
class Tile:
    """Exponentials of a tile.

    Attributes:
        exponentials: [n, r] exp(logit - shift), 0 where a query does not see the token.
        shift: [r], the largest visible logit, or the sink's where that is larger.
        sink: [r] exp(sink - shift), or None.
        total: [r], sum over all tokens and the sink.
    """

    exponentials: Tensor
    shift: Tensor
    sink: Tensor | None
    total: Tensor

    @classmethod
    def of(cls, logits: Tensor, sinks: Tensor | None) -> Tile:
        """From logits [n, r], overwritten, -inf where invisible."""
        top = logits.amax(0) if len(logits) else logits.new_full((logits.shape[1],), float("-inf"))
        if sinks is not None:
            top = torch.maximum(top, sinks)
        shift = torch.where(top == float("-inf"), 0.0, top)
        exponentials = logits.sub_(shift).exp_()
        sink = None if sinks is None else (sinks - shift).exp()
        total = exponentials.sum(0)
        return cls(exponentials, shift, sink, total if sink is None else total + sink)


def atom_sums(tile: Tile, family: Family, values: Tensor, first: int, last: int) -> Sums:
    """Sums over the atoms first..last-1.

    Args:
        values: [n, Dv] in the family's order.
    """
    source = tile.exponentials
    rows, width = source.shape[1], values.shape[1]
    numerators = source.new_empty(last - first, rows, width)
    denominators = source.new_empty(last - first, rows)
    buffer = source.new_empty(min(CHUNK_TOKENS, max(1, len(values))), rows)
    for chunk in family.chunks(first, last):
        start, stop = chunk[0][1], chunk[-1][2]
        gathered = buffer[: stop - start]
        torch.index_select(source, 0, family.order[start:stop], out=gathered)
        for atom, low, high in chunk:
            part, own = gathered[low - start : high - start], values[low:high]
            if low == family.bounds[atom]:
                torch.mm(part.T, own, out=numerators[atom - first])
                torch.sum(part, 0, out=denominators[atom - first])
            else:
                numerators[atom - first].addmm_(part.T, own)
                denominators[atom - first] += part.sum(0)
    return Sums(numerators, denominators)


def over_cells(numerators: Tensor, denominators: Tensor, members: Tensor) -> Sums:
    """Sums over the atoms of every cell.

    Args:
        numerators, denominators: [A, r, Dv], [A, r].
        members: [k, A] 1 where an atom counts.
    """
    flat = members @ numerators.flatten(1)
    return Sums(flat.view(len(members), *numerators.shape[1:]), members @ denominators)
