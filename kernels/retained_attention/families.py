"""Families: cells whose sets cut the tokens into few pieces, so that each piece is multiplied with V once for all."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

CHUNK_TOKENS = 512  # gathered at once: these rows of a tile stay in the cache between the copy and the product
ATOM_TOKENS = 28  # what one more atom costs (a product of its own, sums over it), in tokens of work


@dataclass(frozen=True, eq=False)
class Family:
    """Some cells over n tokens, which fall into atoms: tokens that every cell of the family treats alike.

    Two nested rankings of five budgets make at most 36 atoms, so a token that both keep, or both evict, is read and
    multiplied once and not ten times. What a cell keeps is a sum of atoms.

    Attributes:
        cells: [k] which cells.
        order: [n] the tokens, atom by atom, ascending inside; last the atom that every cell evicts, if there is one.
        bounds: A + 1 places in `order` where the atoms begin and end.
        keeps: [k, A] bool, whether the cell keeps the atom.
    """

    cells: Tensor
    order: Tensor
    bounds: list[int]
    keeps: Tensor

    @property
    def atoms(self) -> int:
        return len(self.bounds) - 1

    @property
    def lost_by_all(self) -> int:
        """How many atoms no cell keeps: 0 or 1, the last."""
        return int(self.atoms > 0 and not bool(self.keeps[:, -1].any()))

    def without(self, tokens: Tensor) -> Family:
        """The same atoms without `tokens`, [n] bool; none of them disappears, though it may be empty."""
        stays = ~tokens[self.order]
        left = torch.cat([stays.new_zeros(1, dtype=torch.int64), stays.cumsum(0)])
        return Family(self.cells, self.order[stays], left[torch.tensor(self.bounds)].tolist(), self.keeps)

    def chunks(self, first: int, last: int) -> list[list[tuple[int, int, int]]]:
        """The atoms first..last-1 as chunks of (atom, start, stop), start and stop places in `order`.

        A chunk holds whole atoms, or one part of a large one.
        """
        found: list[list[tuple[int, int, int]]] = []
        room = 0
        for atom in range(first, last):
            start, stop = self.bounds[atom : atom + 2]
            parts = max(1, -(-(stop - start) // CHUNK_TOKENS))
            edges = [start + (stop - start) * part // parts for part in range(parts + 1)]
            for low, high in zip(edges, edges[1:], strict=False):
                if high - low > room or not found:
                    found.append([])
                    room = CHUNK_TOKENS
                found[-1].append((atom, low, high))
                room -= high - low
        return found


def families_of(kept: Tensor) -> list[Family]:
    """Cells in order, each joined to the family before it while that lowers the work per cell.

    Args:
        kept: [C, n] bool.
    """
    cells, tokens = kept.shape
    sets = kept.numpy()
    found: list[Family] = []
    codes, atoms, members = np.zeros(tokens, np.int64), 1, []
    for cell in range(cells):
        new = codes * 2 + sets[cell]
        there = np.bincount(new, minlength=2 * atoms) > 0
        grown = int(there.sum())
        if members and (tokens + ATOM_TOKENS * grown) * len(members) > (tokens + ATOM_TOKENS * atoms) * (
            len(members) + 1
        ):
            found.append(_family(members, codes, sets))
            members, new = [], sets[cell].astype(np.int64)
            there = np.bincount(new, minlength=2) > 0
            grown = int(there.sum())
        members.append(cell)
        codes, atoms = (np.cumsum(there) - 1)[new], grown
    if members:
        found.append(_family(members, codes, sets))
    return found


def _family(members: list[int], codes: np.ndarray, sets: np.ndarray) -> Family:
    order = np.argsort(codes, kind="stable")
    counts = np.bincount(codes)
    bounds = np.concatenate([[0], np.cumsum(counts)])
    keeps = sets[members][:, order[bounds[:-1]]] if len(codes) else sets[members][:, :0]
    lost = ~keeps.any(0)
    if lost.any():  # the codes of kept tokens are larger, so it is the first
        order = np.concatenate([order[bounds[1] :], order[: bounds[1]]])
        counts, keeps = np.roll(counts, -1), np.roll(keeps, -1, axis=1)
        bounds = np.concatenate([[0], np.cumsum(counts)])
    return Family(torch.tensor(members), torch.from_numpy(order), bounds.tolist(), torch.from_numpy(keeps.copy()))
