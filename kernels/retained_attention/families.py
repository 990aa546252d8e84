"""Families: cells whose sets cut the tokens into few pieces, so that each piece is multiplied with V once for all."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

CHUNK_TOKENS = 512  # gathered at once: these rows of a tile stay in the cache between the copy and the product
# What an atom costs beside its tokens (a product of its own; a sum into every chain), in tokens of work, as measured
# at 1,024 rows and 128 channels; half as much or twice as much moves the whole by a few percent.
PRODUCT_TOKENS, SUM_TOKENS = 6, 8


@dataclass(frozen=True, eq=False)
class Chain:
    """Cells of nested sets, as one ranking cut at several budgets gives them.

    Attributes:
        cells: [c] which cells, the largest set first.
        levels: [n] how many of the cells keep each token: cell j keeps the tokens above level j.
    """

    cells: list[int]
    levels: np.ndarray


@dataclass(frozen=True, eq=False)
class Family:
    """Chains over n tokens, which fall into atoms: tokens that every cell treats alike.

    Two chains of five cells make at most 36 atoms, and a token that both keep, or both evict, is read and multiplied
    once and not twice.

    Attributes:
        chains: whose levels are told apart.
        order: [n] the tokens, atom by atom, ascending inside; last the atom that every cell evicts, if there is one.
        bounds: A + 1 places in `order` where the atoms begin and end.
        levels: per chain the level of each of the A atoms.
    """

    chains: list[Chain]
    order: Tensor
    bounds: list[int]
    levels: list[list[int]]

    @property
    def atoms(self) -> int:
        return len(self.bounds) - 1

    @property
    def kept_atoms(self) -> int:
        """Atoms that some cell keeps: all, or all but the last."""
        return self.atoms - int(self.atoms > 0 and not any(own[-1] for own in self.levels))

    def without(self, tokens: np.ndarray) -> Family:
        """The same atoms without `tokens`, [n] bool; none of them disappears, though it may be empty."""
        stays = ~tokens[self.order.numpy()]
        left = np.concatenate([[0], np.cumsum(stays)])
        return Family(self.chains, self.order[torch.from_numpy(stays)], left[self.bounds].tolist(), self.levels)

    def chunks(self, first: int, last: int) -> list[list[tuple[int, int, int]]]:
        """The atoms first..last-1 as chunks of (atom, start, stop), start and stop places in `order`.

        A chunk holds whole atoms, or one part of a large one; atoms without tokens are in none.
        """
        found: list[list[tuple[int, int, int]]] = []
        room = 0
        for atom in range(first, last):
            start, stop = self.bounds[atom : atom + 2]
            parts = -(-(stop - start) // CHUNK_TOKENS)
            edges = [start + (stop - start) * part // parts for part in range(parts + 1)] if parts else []
            for low, high in itertools.pairwise(edges):
                if high - low > room:
                    found.append([])
                    room = CHUNK_TOKENS
                found[-1].append((atom, low, high))
                room -= high - low
        return found


def families_of(kept: Tensor, evicted_too: bool, groups: Sequence[int] | None = None) -> list[Family]:
    """Cells in order: nested ones make a chain, and a chain joins the family before it where that saves work.

    Args:
        kept: [C, n] bool.
        evicted_too: whether tokens that every cell evicts are work as well.
        groups: [C], cells of different groups are in no family together; None is one group.
    """
    found: list[Family] = []
    joined: _Joined | None = None
    mine = [0] * len(kept) if groups is None else list(groups)
    for chain in _chains(kept.numpy(), mine):
        alone = _Joined.of(chain)
        if joined is not None:
            alike = mine[joined.chains[0].cells[0]] == mine[chain.cells[0]]
            both = joined.with_chain(alone) if alike else None
            if both is not None and both.work(evicted_too) <= joined.work(evicted_too) + alone.work(evicted_too):
                joined = both
                continue
            found.append(joined.family())
        joined = alone
    return found if joined is None else [*found, joined.family()]


def _chains(sets: np.ndarray, groups: list[int]) -> list[Chain]:
    found: list[Chain] = []
    for cell, kept in enumerate(sets):
        if found and groups[found[-1].cells[0]] == groups[cell]:
            levels, size = found[-1].levels, int(kept.sum())
            inside = int(levels[kept].min()) if size else len(found[-1].cells)
            outside = int(levels[~kept].max()) if size < len(kept) else 0
            if outside <= inside:  # nested: at most one level is cut in two
                sizes = [int((levels > place).sum()) for place in range(len(found[-1].cells))]
                place = sum(other >= size for other in sizes)
                cells = [*found[-1].cells[:place], cell, *found[-1].cells[place:]]
                found[-1] = Chain(cells, levels + kept)
                continue
        found.append(Chain([cell], kept.astype(np.int16)))
    return found


@dataclass(frozen=True, eq=False)
class _Joined:
    """Chains that may become a family: the atom of each token, numbered so that 0 is what nobody keeps."""

    chains: list[Chain]
    codes: np.ndarray  # [n], 0..A-1
    counts: np.ndarray  # [A], none of them 0
    nobody: bool  # whether atom 0 is kept by no cell

    @classmethod
    def of(cls, chain: Chain) -> _Joined:
        return cls._compact([chain], chain.levels.astype(np.int64))

    @classmethod
    def _compact(cls, chains: list[Chain], codes: np.ndarray) -> _Joined:
        counts = np.bincount(codes)
        there = counts > 0
        nobody = bool(len(counts) and there[0])
        return cls(chains, (np.cumsum(there) - 1)[codes] if len(codes) else codes, counts[there], nobody)

    def with_chain(self, other: _Joined) -> _Joined | None:
        """Both, None where the numbers of atoms alone say that it would not do."""
        if (len(self.counts) + 1) * (len(other.counts) + 1) > 1 << 16:
            return None
        mine, theirs = self.codes + (not self.nobody), other.codes + (not other.nobody)
        size = len(other.counts) + (not other.nobody)
        return self._compact([*self.chains, *other.chains], mine * size + theirs)

    def work(self, evicted_too: bool) -> int:
        """In tokens multiplied with V."""
        chains = len(self.chains)
        tokens = int(self.counts.sum()) - int(not evicted_too and self.nobody and self.counts[0])
        return tokens + len(self.counts) * (PRODUCT_TOKENS + (SUM_TOKENS * chains if chains > 1 else 0))

    def family(self) -> Family:
        atoms = len(self.counts)
        order = np.argsort((atoms - 1 - self.codes).astype(np.uint16), kind="stable")  # what nobody keeps is last
        bounds = np.concatenate([[0], np.cumsum(self.counts[::-1])])
        starts = order[bounds[:-1]] if atoms else order[:0]
        levels = [chain.levels[starts].tolist() for chain in self.chains]
        return Family(self.chains, torch.from_numpy(order), bounds.tolist(), levels)
