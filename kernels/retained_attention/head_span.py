"""Head span: one KV head over a run of steps in which few sets change, and its families of cells."""

from __future__ import annotations

from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from .families import Family, families_of
from .inputs import Inputs
from .own_maximum import Rows, by_own_maximum
from .tile import Chunk, Sums, Tile, Workspace, add_levels, tiny_for

Which = Literal["all", "errors"]


class HeadSpan:
    """One KV head over one span of steps.

    Args:
        columns: which of the N keys some step of the span sees.
        leaves: [C, n] evict_step of these columns.
        steps: [s] the steps of the span.
        which: what is asked for, see `errors.cell_errors`.
        memory: what a tile works in; a tile lives until the next one is made.
        kept: [n] bool, the columns that some cell keeps: only these are then read; None is all.
        numbers: what the C cells are called; None is 0..C-1.
        groups: [C] see `families_of`.

    Attributes:
        drops: whether only the columns that some cell keeps are read.
        grouped: whether groups were given.
    """

    def __init__(
        self,
        inputs: Inputs,
        kv_head: int,
        columns: slice | Tensor,
        leaves: Tensor,
        steps: Tensor,
        which: Which,
        memory: Workspace,
        kept: Tensor | None = None,
        numbers: list[int] | None = None,
        groups: list[int] | None = None,
    ) -> None:
        self.inputs, self.kv_head, self.which, self.memory = inputs, kv_head, which, memory
        self.numbers = list(range(len(leaves))) if numbers is None else numbers
        self._everything, self._steps = (columns, leaves), steps
        self._undropped: dict[int, HeadSpan] = {}
        self.drops, self.grouped = kept is not None, groups is not None
        self._columns = columns
        if kept is not None:
            chosen = kept.nonzero()[:, 0]
            self._columns = chosen + columns.start if isinstance(columns, slice) else columns[chosen]
            leaves = leaves[:, chosen]
        self.keys, self.rows = inputs.keys[kv_head][self._columns], inputs.rows[self._columns]
        self.tiny = tiny_for(self.keys.dtype, inputs.least_values[kv_head])
        stays = leaves > steps.min()  # [C, n]
        moving = stays & (leaves <= steps.max())
        self.families = []
        for family in families_of(stays, which == "all", groups):
            cells = [cell for chain in family.chains for cell in chain.cells]
            self.families.append(Members(self, family, leaves, moving[cells].any(0)))

    def undropped(self, members: Members) -> HeadSpan:
        """The cells of one family over all columns, for errors from both sides of the cut."""
        if id(members) not in self._undropped:
            columns, leaves = self._everything
            cells = [cell for chain in members.family.chains for cell in chain.cells]
            where = (self.inputs, self.kv_head, columns, leaves[cells], self._steps)
            self._undropped[id(members)] = HeadSpan(*where, "all", self.memory, numbers=cells)
        return self._undropped[id(members)]

    @cached_property
    def values(self) -> Tensor:
        """[n, Dv]."""
        return self.inputs.values[self.kv_head][self._columns]

    def values_in(self, order: Tensor) -> Tensor:
        """[n, Dv] in this order, copied once."""
        columns = self._columns
        places = order + columns.start if isinstance(columns, slice) else columns[order]
        return self.inputs.values[self.kv_head][places]

    @cached_property
    def _ascending(self) -> tuple[Tensor, Tensor]:
        """Rows of the columns that are read, and of all columns, ascending."""
        return self.rows.sort().values, self.inputs.rows[self._everything[0]].sort().values

    def sees_dropped(self, part: slice) -> Tensor:
        """[b] bool, steps that would see a key that is not read."""
        steps, first = self.inputs.steps[part], self.inputs.first_visible[part]

        def seen(rows: Tensor) -> Tensor:
            return torch.searchsorted(rows, steps, right=True) - torch.searchsorted(rows, first)

        read, every = self._ascending
        return seen(every) > seen(read)

    def both_sides(self, part: slice, rows: Tensor, cell: int) -> Rows:
        """One cell over all columns for a few `rows` of a tile, by each side's own maximum."""
        inputs, (columns, leaves) = self.inputs, self._everything
        steps = inputs.steps[part]
        at = rows % steps.numel()
        found, first = inputs.rows[columns][:, None], inputs.first_visible[part][at]
        logits = self._logits(inputs.keys[self.kv_head][columns], part, rows, None)
        logits.masked_fill_((found < first) | (found > steps[at]), float("-inf"))
        sinks = inputs.sinks(inputs.query_heads_of(self.kv_head), part)
        gone = leaves[cell][:, None] <= steps[at]
        values = inputs.values[self.kv_head][columns]
        return by_own_maximum(logits, gone, values, None if sinks is None else sinks[rows])

    def logits(self, part: slice, rows: slice | Tensor, buffer: Tensor | None = None) -> Tensor:
        """[n, r] of the rows `rows` of the tile, whether visible or not; in the memory of `buffer` where given."""
        return self._logits(self.keys, part, rows, buffer)

    def _logits(self, keys: Tensor, part: slice, rows: slice | Tensor, buffer: Tensor | None) -> Tensor:
        inputs = self.inputs
        queries = inputs.queries[inputs.query_heads_of(self.kv_head), part].reshape(-1, inputs.queries.shape[2])[rows]
        shape = len(keys), len(queries)
        into = None if buffer is None else buffer[: shape[0] * shape[1]].view(shape)
        logits = torch.mm(keys, (queries * inputs.scale).T, out=into)
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

    def __init__(self, span: HeadSpan, family: Family, leaves: Tensor, moving: Tensor) -> None:
        self.family, self.leaves = family.without(moving.numpy()) if bool(moving.any()) else family, leaves
        self.moving, self.moves, self.memory = moving.nonzero()[:, 0], moving.numpy(), span.memory
        family = self.family
        values = span.values_in(family.order)
        self.kept_chunks = Chunk.of(family, values, 0, family.kept_atoms)
        self.lost_chunks = Chunk.of(family, values, family.kept_atoms, family.atoms)

    def sums(self, tile: Tile, every: bool) -> list[Sums]:
        """Per chain and level, over all atoms or over those that some cell keeps; until it is called again."""
        sizes = [len(chain.cells) + 1 for chain in self.family.chains]
        found = self.memory.levels(sizes, tile.exponentials.shape[1])
        chunks = [*self.kept_chunks, *self.lost_chunks] if every else self.kept_chunks
        add_levels(found, tile, self.family, chunks, self.memory)
        return found

    def add_lost_by_all(self, tile: Tile, sums: list[Sums]) -> None:
        """Put what `sums` without `every` left out to level 0."""
        add_levels(sums, tile, self.family, self.lost_chunks, self.memory)
