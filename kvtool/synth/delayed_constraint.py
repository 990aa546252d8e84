"""delayed-constraint: a prefix that nobody attends to until the end, as a rule stated first and needed last."""

from __future__ import annotations

import torch

from kvtool.synth.scene import Group, Scene, Size, Wish

QUIET = 4.0  # queries' coefficient against what they avoid; times 2 of the key a logit of -8
SHARE = 0.8


def delayed_constraint(size: Size) -> Scene:
    """Rows 4 .. 4 + prompt/16 hold one rule. Every query avoids them until the last half of the steps behind the
    prompt, which give them 80 % of their attention.

    Nothing in the past says so: whoever ranks by past queries, as they were or as a distribution, puts the prefix
    last. Only the future (oracles) or an unconditional protection of the first rows keeps it.
    """
    prefix = list(range(4, 4 + size.prompt // 16))
    onset = size.prompt + size.steps // 2
    return Scene(
        answer=f"keep rows {prefix[0]} to {prefix[-1]}: no query before step {onset} attends to them, "
        f"every later one gives them {SHARE:.0%} of its attention",
        landmarks={"prefix": prefix},
        groups={"prefix": Group(prefix, {"prefix": 2.0}, value={0: 2.0})},
        queries={"prefix": torch.full((size.tokens,), -QUIET, dtype=torch.float64)},
        wishes=(Wish(onset, size.tokens, ("prefix",), {"prefix": SHARE}),),
    )
