"""competing-evidence: two near-identical keys with opposite values, and an output that is their difference."""

from __future__ import annotations

import torch

from kvtool.synth.scene import Group, Scene, Size, Wish

KEY, APART = 3.0, 0.4  # of both keys, and what tells them apart
LEADS, TRAILS = 0.45, 0.35
READ = 0.3  # attention of the prompt's queries on the one they read
SOURCE = 20.0  # the prompt's queries prefer one by a logit of 2 · SOURCE · APART


def competing_evidence(size: Size) -> Scene:
    """One row says yes, another no, under keys that differ in one small component. Queries of the prompt read the
    first and avoid the second. Queries behind the prompt read both; at even steps the first leads by 45 % to 35 %
    of attention, at odd steps the second.

    Values are opposite, so the output is what is left of the balance. Losing one of the two costs half of
    their mass and turns the output into the other's full value; losing both costs all of it and less error.
    """
    yes, no = size.row(0.4), size.row(0.6)
    tokens = size.tokens
    even = torch.arange(size.prompt, tokens) % 2 == 0
    first = torch.where(even, LEADS, TRAILS).to(torch.float64)
    source = torch.full((tokens,), SOURCE, dtype=torch.float64)
    # until both are there: a logit of 3 on the first, and so of 3 - 2 · SOURCE · APART on the second
    shared = torch.full((tokens,), (3.0 - SOURCE * APART) / KEY, dtype=torch.float64)
    return Scene(
        answer=f"keep rows {yes} and {no} together: their values are opposite, and the output is their difference",
        landmarks={"yes": [yes], "no": [no]},
        groups={
            "yes": Group([yes], {"common": 2.0, "evidence": KEY, "source": APART}, plain=True, value={0: 6.0}),
            "no": Group([no], {"common": 2.0, "evidence": KEY, "source": -APART}, plain=True, value={0: -6.0}),
        },
        queries={"evidence": shared, "source": source},
        wishes=(
            Wish(no + 1, size.prompt, ("evidence",), {"yes": READ}),
            Wish(size.prompt, tokens, ("evidence", "source"), {"yes": first, "no": LEADS + TRAILS - first}),
        ),
    )
