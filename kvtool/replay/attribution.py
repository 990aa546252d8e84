"""Attribution: predicted KL told apart by evicted token, in a second pass over the layers.

A token's share is weighed by what all layers did together, so it is known only after the first pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvtool.metrics import PredictedKL, Whole, token_shares
from kvtool.replay.gather import Work, arrow_tables, by_sequence
from kvtool.replay.parts import Part
from kvtool.replay.plan import Plan
from kvtool.replay.work import evaluated_from
from kvtool.result import table_of


def attribute(plan: Plan, work: Work, parts: list[Part], progress: Callable[[int, int, str], None] | None) -> Any:
    """The table `token_shares`: one entry per cell, sequence, layer and KV head that lost tokens."""
    entries: list[dict[str, Any]] = []
    tables = [arrow_tables(part) for part in parts]
    wholes = {
        (sequence, index): Whole.of([parts[place].partials[index][PredictedKL.name] for place in places])
        for sequence, places in by_sequence(work).items()
        for index in range(len(plan.cells))
    }
    for done, (sequence, layer_id, step) in enumerate(work):
        if progress is not None:
            progress(done, len(work), f"token shares: sequence {sequence.index} layer {layer_id}")
        # Where little attention is left, shares are large and cancel: float64 whatever the run computes in.
        layer = sequence.layer(layer_id, dtype=torch.float64)
        heads = layer.geometry.kv_heads
        if layer.gradients is None:
            continue
        decided = tables[done]["evict_steps"].select(["achieved", "evict_step"]).to_pylist()
        for index, cell in enumerate(plan.cells):
            whole = wholes[sequence.index, index]
            if whole is None:
                continue
            of_cell = decided[index * heads : (index + 1) * heads]
            evict_step = torch.tensor([entry["evict_step"] for entry in of_cell])
            shares = token_shares(layer, evict_step, whole, evaluated_from(cell.schedule, sequence))
            for head in range(heads):
                evicted = (evict_step[head] < layer.tokens).nonzero()[:, 0]
                if evicted.numel():
                    entries.append(
                        {
                            "sequence": sequence.index,
                            **cell.key(plan),
                            "achieved": of_cell[head]["achieved"],
                            "event": step,
                            "layer": layer_id,
                            "kv_head": head,
                            "tokens": evicted.tolist(),
                            "shares": shares[head, evicted].tolist(),
                        }
                    )
    # An empty table has the columns of a full one.
    return table_of("token_shares", entries or [{"tokens": [], "shares": []}]).slice(0, len(entries))
