"""saturated-token: one token holds nearly all attention, and no query moves that."""

from __future__ import annotations

from kvtool.synth.scene import Group, Scene, Size

SHARE = 0.97


def saturated_token(size: Size) -> Scene:
    """One early row gets about 97 % of the attention of every query behind it, by a coefficient that is the same
    in all of them.

    Its weight a is near 1, so the derivative a (1 - a) is near 0, and its logit does not vary with the query: it does
    not respond to anything. Scores that measure response give it nothing, scores that measure attention all.
    """
    row = max(8, size.prompt // 32)
    return Scene(
        answer=f"keep row {row}: it holds at least {SHARE:.0%} of every later query's attention, whatever the query",
        landmarks={"saturated": [row]},
        groups={"saturated": Group([row], {"saturated": 4.0}, plain=True, value={0: 3.0})},
        at_least={"saturated": ("saturated", SHARE)},
    )
