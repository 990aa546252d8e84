"""phase-shift: the queries' centre jumps shortly before the prompt ends."""

from __future__ import annotations

import torch

from kvtool.synth.delayed_constraint import QUIET
from kvtool.synth.scene import Group, Scene, Size, Wish

SHARE = 0.7


def phase_shift(size: Size) -> Scene:
    """Two passages. Queries of the first seven eighths of the prompt give the first 70 % of their attention and
    avoid the second; from then on, and to the end, it is the other way round.

    Means over the whole past still point at the first passage. The newest queries tell the truth.
    """
    before, after = size.passage(0.25), size.passage(0.55)
    jump = size.prompt - size.prompt // 8
    rows = torch.arange(size.tokens)
    against = {
        "before": torch.where(rows >= jump, -QUIET, 0.0).to(torch.float64),
        "after": torch.where(rows < jump, -QUIET, 0.0).to(torch.float64),
    }
    return Scene(
        answer=f"keep rows {after[0]} to {after[-1]} rather than {before[0]} to {before[-1]}: from step {jump} on "
        f"queries give them {SHARE:.0%} of their attention, which they gave to the others before",
        landmarks={"before": before, "after": after},
        groups={
            "before": Group(before, {"before": 2.0}, value={0: 2.0}),
            "after": Group(after, {"after": 2.0}, value={1: 2.0}),
        },
        queries=against,
        wishes=(
            Wish(before[-1] + 1, jump, ("before",), {"before": SHARE}),
            Wish(jump, size.tokens, ("after",), {"after": SHARE}),
        ),
    )
