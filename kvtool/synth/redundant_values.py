"""redundant-values: a crowd of tokens that all say the same, and one that says something else."""

from __future__ import annotations

import torch

from kvtool.synth.scene import Group, Scene, Size, Wish

CROWD, RARE = 1.5, 0.25  # logits that past queries give, over background
SHARE = 0.5
AROUND = 6


def redundant_values(size: Size) -> Scene:
    """Half of the prompt's rows share one value direction and get more attention than all others. One row holds
    a direction of its own and gets a little less than each of the crowd, until the queries behind the prompt give
    it half of their attention.

    Any single one of the crowd can go without loss, the rare one cannot. Attention ranks it behind the whole
    crowd; leverage knows that its direction is held once.
    """
    row = size.row(0.45)
    crowd = [r for r in range(8, size.prompt) if r % 16 < 8 and abs(r - row) > AROUND]
    rest = [r for r in range(4, size.prompt) if r not in {*crowd, row}]
    tokens = size.tokens
    return Scene(
        answer=f"keep row {row}: it alone holds its value direction, while {len(crowd)} rows that get more "
        "attention share one",
        landmarks={"rare": [row]},
        groups={
            "crowd": Group(crowd, {"topic": 2.0}, value={0: 2.0}),
            "rest": Group(rest, {}, value={}, spread=0.1),
            "rare": Group([row], {"topic": 2.0 * RARE / CROWD, "rare": 2.0}, value={1: 4.0}),
        },
        queries={"topic": torch.full((tokens,), CROWD / 2.0, dtype=torch.float64)},
        wishes=(Wish(size.prompt, tokens, ("rare",), {"rare": SHARE}),),
    )
