"""needle: one key at a chosen depth that no query of the prompt attends to and the last queries want."""

from __future__ import annotations

import torch

from kvtool.synth.delayed_constraint import QUIET
from kvtool.synth.scene import Group, Scene, Size, Wish

SHARE = 0.9
AROUND = 4  # rows on either side that are avoided too, so that pooling along the sequence does not rescue it


def needle(size: Size) -> Scene:
    """One row at `depth` of the prompt, in a passage that every query avoids, until the last half of the steps
    behind the prompt give that row 90 % of their attention.

    Its key points away from all others (it lacks what ordinary keys share) and is longer than they are: keeping
    unusual keys finds it, keeping short ones does not, and attention so far says nothing.
    """
    row = min(size.row(size.depth), size.prompt - 1)
    near = [r for r in range(row - AROUND, row + AROUND + 1) if 4 <= r < size.prompt and r != row]
    onset = size.prompt + size.steps // 2
    return Scene(
        answer=f"keep row {row}: no query before step {onset} attends to it, every later one gives it "
        f"{SHARE:.0%} of its attention",
        landmarks={"needle": [row]},
        groups={
            "near": Group(near, {"quiet": 2.0}),
            "needle": Group([row], {"quiet": 2.0, "needle": 4.0}, plain=True, value={0: 4.0}),
        },
        queries={"quiet": torch.full((size.tokens,), -QUIET, dtype=torch.float64)},
        wishes=(Wish(onset, size.tokens, ("needle",), {"needle": SHARE}),),
    )
