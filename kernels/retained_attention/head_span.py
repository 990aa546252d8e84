"""Head span: one KV head over a run of steps in which few sets change, and its families of cells."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from .families import Family, families_of
from .inputs import Inputs
from .tile import Sums, Tile, Workspace, add_levels, tiny_for

Which = Literal["all", "errors"]


class HeadSpan:
    """One KV head over one span of steps.

    Args:
        columns: which of the N keys take part: all that some step of the span sees, or those that some cell keeps.
        leaves: [C, n] evict_step of these columns.
        steps: [s] the steps of the span.
        memory: what a tile works in; a tile lives until the next one is made.
        dropped: [m] rows of visible keys that are not among the columns, since every cell has evicted them.
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
        dropped: Tensor | None = None,
    ) -> None:
        self.dropped = None if dropped is None else dropped.sort().values
        self.inputs, self.kv_head, self.which, self.memory = inputs, kv_head, which, memory
        self.keys, self.values = inputs.keys[kv_head][columns], inputs.values[kv_head][columns]
        self.rows, self.tiny = inputs.rows[columns], tiny_for(self.values)
        kept = leaves > steps.min()  # [C, n]
        moving = kept & (leaves <= steps.max())
        self.families = []
        for family in families_of(kept, which == "all"):
            cells = [cell for chain in family.chains for cell in chain.cells]
            self.families.append(Members(self, family, leaves, moving[cells].any(0)))

    def sees_dropped(self, part: slice) -> Tensor:
        """[b] bool, steps that would see a key that was dropped."""
        steps, first = self.inputs.steps[part], self.inputs.first_visible[part]
        if self.dropped is None:
            return torch.zeros_like(steps, dtype=torch.bool)
        return torch.searchsorted(self.dropped, steps, right=True) > torch.searchsorted(self.dropped, first)

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

    def __init__(self, span: HeadSpan, family: Family, leaves: Tensor, moving: Tensor) -> None:
        self.family, self.leaves = family.without(moving.numpy()) if bool(moving.any()) else family, leaves
        self.moving, self.moves, self.memory = moving.nonzero()[:, 0], moving.numpy(), span.memory
        self.values = span.values[self.family.order]

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
